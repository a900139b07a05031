"""The tests: a folder for each package of the product, and `support/` for what they share."""
