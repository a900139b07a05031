"""The phrases that pairs.py fills its grammars with. Owns words alone; slots in braces are those of generate.Maker.fill."""

# what says so, what says the contrary, a question with yes for the first, one with yes for the second
NEGATIONS: list[tuple[list[str], list[str], str, str]] = [
    (["The parcel was damaged when it came on {day}.", "The parcel came on {day}, badly damaged."],
     ["The parcel was not damaged when it came on {day}.", "The parcel came on {day} without any damage.", "The parcel came on {day}, undamaged."],
     "Was the parcel damaged?", "Did the parcel arrive undamaged?"),
    (["The lamp works.", "The lamp still works after {count} days.", "Now the lamp works again."],
     ["The lamp does not work.", "The lamp no longer works.", "Even after {count} days the lamp won't work."],
     "Does the lamp work?", "Is the lamp out of order?"),
    (["{name} signed the contract.", "The contract has been signed by {name}."],
     ["{name} never signed the contract.", "{name} refused to sign the contract.", "The contract has not been signed by {name}."],
     "Is the contract signed?", "Is the signature missing?"),
    (["The payment went through.", "The payment went through on {date}."],
     ["The payment did not go through.", "The payment failed on {date}.", "The payment has not gone through yet."],
     "Did the payment succeed?", "Did the payment fail?"),
    (["Everybody was at the meeting.", "Nobody was missing at the meeting."],
     ["Not everybody was at the meeting.", "{name} was missing at the meeting.", "Everybody but {name} was at the meeting."],
     "Was everybody at the meeting?", "Was anybody missing at the meeting?"),
    (["Some of the tests failed.", "{count} tests failed.", "Not all of the tests passed."],
     ["None of the tests failed.", "All of the tests passed.", "Not one of the {count} tests failed."],
     "Did any test fail?", "Did all tests pass?"),
    (["{name} speaks French.", "{name} speaks French as well as Spanish."],
     ["{name} does not speak French.", "{name} speaks Spanish but no French.", "{name} hardly speaks a word of French."],
     "Does this person speak French?", "Does this person lack French?"),
    (["The shop is open on Sunday.", "The shop is open every day, on Sunday too."],
     ["The shop is not open on Sunday.", "The shop is open every day except Sunday.", "On Sunday the shop stays closed."],
     "Can one shop there on Sunday?", "Is the shop closed on Sunday?"),
    (["Dogs are allowed in the room.", "You may bring your dog into the room."],
     ["Dogs are not allowed in the room.", "Please leave your dog outside the room.", "No dogs in the room."],
     "Are dogs allowed in the room?", "Are dogs forbidden in the room?"),
    (["The dish contains nuts.", "The dish contains milk and nuts."],
     ["The dish contains no nuts.", "The dish contains milk but no nuts.", "The dish is free of nuts."],
     "Does the dish contain nuts?", "Can someone who must avoid nuts eat the dish?"),
    (["I would buy it again.", "I would buy it again at once."],
     ["I would not buy it again.", "I will never buy it again.", "I would rather not buy it again."],
     "Would the writer buy it again?", "Does the writer regret buying it?"),
    (["The price includes breakfast.", "Breakfast is included in the price of {price}."],
     ["The price does not include breakfast.", "Breakfast is not included in the price of {price}.", "Breakfast costs extra."],
     "Is breakfast included?", "Does breakfast cost extra?"),
    (["The bug has been fixed.", "The bug is fixed since {date}."],
     ["The bug has not been fixed.", "The bug is still there since {date}.", "Nobody has fixed the bug yet."],
     "Is the bug fixed?", "Does the bug still exist?"),
    (["You need a licence for this.", "Without a licence you cannot do this."],
     ["You need no licence for this.", "You can do this without a licence.", "A licence is not needed for this."],
     "Is a licence needed?", "Can it be done without a licence?"),
    (["I got your reply.", "Your reply has reached me on {day}."],
     ["I got no reply.", "I have not got your reply.", "I am still waiting for your reply since {day}."],
     "Did the writer get a reply?", "Is the writer still waiting for a reply?"),
    (["It fits well.", "It fits, just as I hoped."],
     ["It does not fit.", "It does not fit as I hoped.", "It is far from fitting."],
     "Does it fit?", "Is the size wrong?"),
    (["The film was good.", "The film was not bad at all.", "I cannot say that the film was bad."],
     ["The film was bad.", "The film was not good at all.", "I cannot say that the film was good."],
     "Did the writer like the film?", "Did the writer dislike the film?"),
    (["Please call me back.", "Please call me back on {day}."],
     ["Please do not call me back.", "There is no need to call me back.", "You need not call me back on {day}."],
     "Should one call back?", "Is it fine not to call back?"),
    (["The server is reachable.", "The server is reachable again since {time}."],
     ["The server is not reachable.", "The server is unreachable since {time}.", "The server cannot be reached."],
     "Can the server be reached?", "Is the server down?"),
    (["The door was locked.", "{name} made sure that the door was locked."],
     ["The door was not locked.", "{name} forgot to lock the door.", "The door was left unlocked."],
     "Was the door locked?", "Was the door unlocked?"),
]  # fmt: skip

# past, plain form, participle
DEEDS = [tuple(deed.split("/")) for deed in (
    "invited/invite/invited called/call/called paid/pay/paid visited/visit/visited helped/help/helped "
    "followed/follow/followed replaced/replace/replaced thanked/thank/thanked met/meet/met taught/teach/taught "
    "hired/hire/hired beat/beat/beaten blamed/blame/blamed warned/warn/warned drove/drive/driven"
).split()]  # fmt: skip

ROUTES = [
    "The train goes from <from> to <to>.", "We flew to <to> from <from> on {day}.", "The parcel was sent from <from> to <to> on {date}.",
    "{name} moved from <from> to <to> in {year}.", "The bus leaves <from> at {time} and arrives in <to> in the evening.",
    "Please book a ticket to <to>, leaving from <from>.", "Flight {number}: <from> to <to>.", "The road leads out of <from> into <to>.",
]  # fmt: skip

AMOUNTS = [
    ("The total is <n> euros.", "the total"), ("{name} ordered <n> boxes.", "the number of boxes"),
    ("The invoice number is <n>.", "the invoice number"), ("The room has <n> seats.", "the number of seats"),
    ("It weighs <n> grams.", "the weight"), ("The road is <n> metres long.", "the length"),
    ("There were <n> visitors on {day}.", "the number of visitors"), ("The code of the door is <n>.", "the code"),
    ("The book has <n> pages.", "the number of pages"), ("The rent is <n> dollars a month.", "the rent"),
    ("The error came <n> times.", "the count of errors"), ("The tank holds <n> litres.", "the volume of the tank"),
]  # fmt: skip

# a rule with an upper limit, a case, a question with yes where the case keeps it, one with yes where it breaks it
LIMITS = [
    ("Goods may be returned within <n> days.", "{name} returned the shoes after <n> days.", "Can the goods be returned?", "Is the return too late?"),
    ("A bag may weigh at most <n> kg.", "{name}'s bag weighs <n> kg.", "May the bag come along?", "Is the bag too heavy?"),
    ("Expenses up to <n> euros need no approval.", "{name} spent <n> euros on a chair.", "Does it go without approval?", "Is approval needed?"),
    ("The hall holds no more than <n> guests.", "{name} invited <n> guests to the hall.", "Do the guests fit?", "Are there too many guests?"),
    ("Answers must be given within <n> hours.", "The answer to {name} came after <n> hours.", "Was the answer in time?", "Was the answer late?"),
    ("The speed limit is <n> km/h.", "{name} drove at <n> km/h.", "Was the speed allowed?", "Was it too fast?"),
    ("A post may have up to <n> words.", "The post of {name} has <n> words.", "Is the post short enough?", "Is the post too long?"),
    ("The fridge must not be warmer than <n> degrees.", "The fridge is at <n> degrees.", "Is the fridge cold enough?", "Is the fridge too warm?"),
    ("Uploads are limited to <n> MB.", "The upload of {name} has <n> MB.", "Can it be uploaded?", "Is the upload too large?"),
    ("Nobody may work more than <n> hours a week.", "{name} worked <n> hours this week.", "Were the hours allowed?", "Were there too many hours?"),
    ("The ride is only for children up to <n> years.", "{name} is <n> years old.", "May the child ride?", "Is the child too old?"),
]  # fmt: skip

DEADLINES = [
    ("The form was due on <due>. It was handed in on <done>.", "Was the form in time?", "Was the form late?"),
    ("The offer ended on <due>. The order came on <done>.", "Was the order in time for the offer?", "Was the order too late for the offer?"),
    ("The warranty runs until <due>. The machine broke on <done>.", "Was it under warranty when it broke?", "Had the warranty ended?"),
    ("Applications close on <due>. Hers was sent on <done>.", "Was the application in time?", "Was the application late?"),
    ("Payment by <due>, please. It was paid on <done>.", "Was it paid in time?", "Was it paid too late?"),
    ("The library wanted the book back by <due>. It was returned on <done>.", "Was the book in time?", "Is there a fine for being late?"),
]  # fmt: skip

UNITS = [unit.split("/") for unit in (
    "minutes/hours/days/weeks/months", "grams/kilograms/tonnes", "metres/kilometres/miles/inches", "euros/dollars/pounds/francs",
    "litres/millilitres/gallons", "degrees Celsius/degrees Fahrenheit", "kilobytes/megabytes/gigabytes", "volts/watts/amperes",
)]  # fmt: skip

STEPS = [
    "unpack the box", "call the office", "check the invoice", "paint the wall", "feed the cat", "lock the door", "restart the server",
    "write the report", "clean the kitchen", "pay the bill", "charge the phone", "read the manual", "send the parcel", "boil the water",
    "update the driver", "ask the doctor", "book the hotel", "run the tests", "empty the bin", "sign the form",
]  # fmt: skip

# what is wanted, names for the wish
WANTED = [
    ("a refund", ["refund", "money back", "reimbursement"]), ("a replacement", ["replacement", "exchange", "new item"]),
    ("a repair", ["repair", "fix it", "mending"]), ("an invoice", ["invoice", "bill copy", "receipt"]),
    ("a discount", ["discount", "lower price", "price cut"]), ("a call back", ["call back", "phone call", "ring the customer"]),
    ("an appointment", ["appointment", "fix a date", "booking"]), ("an upgrade", ["upgrade", "bigger plan", "more features"]),
    ("a cancellation", ["cancellation", "end the contract", "terminate"]), ("a later delivery", ["delay delivery", "later date", "postpone"]),
    ("an apology", ["apology", "say sorry", "excuse"]), ("a password reset", ["password reset", "new password", "log-in help"]),
]  # fmt: skip
CONTRASTS = [
    "I want {0}, not {1}.", "I don't want {1}. What I need is {0}.", "Only {0} will do; keep your offer of {1} for others.",
    "You offered {1}, but I would like {0} instead.", "Instead of {1} please give me {0}.", "It is not about {1}, I ask for {0}.",
    "Thanks for offering {1}, that is not what I am after. Please arrange {0}.", "{1}? I have had enough of that. {0}, please!",
]  # fmt: skip

# field, its values, what a question calls it
FIELDS: list[tuple[str, list[str | bool], str]] = [
    ("status", ["paid", "open", "cancelled", "shipped", "refunded"], "the status"), ("paid", [True, False], "the field paid"),
    ("priority", ["low", "normal", "high", "urgent"], "the priority"), ("plan", ["free", "basic", "pro", "enterprise"], "the plan"),
    ("payment", ["card", "invoice", "cash", "transfer"], "the way of payment"), ("verified", [True, False], "the field verified"),
    ("size", ["small", "medium", "large"], "the size"), ("role", ["admin", "editor", "viewer", "guest"], "the role"),
    ("colour", ["red", "green", "blue", "black", "white"], "the colour"), ("subscribed", [True, False], "the field subscribed"),
    ("weather", ["sunny", "rainy", "cloudy", "stormy"], "the weather"), ("result", ["passed", "failed", "skipped"], "the result"),
    ("country", ["France", "Japan", "Brazil", "Kenya"], "the country"), ("carrier", ["bike", "van", "lorry", "drone"], "the carrier"),
]  # fmt: skip

# by level the words that fill <x>, the levels' own wording, the question
LADDERS: list[tuple[dict[str, list[str]], list[str], str]] = [
    ({"frames": ["<x>", "A report: <x>", "{name} writes: <x>"],
      "0": ["The letter in the logo is a bit too thin.", "A comma is missing on the page of imprints.", "The icon could be a little rounder."],
      "1": ["One user cannot change the picture.", "{name} sees an old price in the cart.", "The export is slow for one of us."],
      "2": ["The whole team cannot log in since {time}.", "All of our {count} colleagues in {city} get errors.", "The shop's search finds nothing for anyone in {city}."],
      "3": ["Nothing works anywhere, every customer is cut off.", "All data of all customers are gone.", "The whole company stands still, and money is lost by the minute."]},
     ["cosmetic", "one user is hindered", "a whole group is hindered", "everything is down"], "How severe is it?"),
    ({"frames": ["<x>", "About the case of {name}: <x>"],
      "0": ["No hurry, some time next year.", "Whenever you find the time.", "It can wait for months."],
      "1": ["Within a few weeks would be fine.", "By the end of next month, please."],
      "2": ["By tomorrow, please.", "I need it within a day.", "It has to be done today."],
      "3": ["Right now, within minutes!", "At once, people are waiting at the door!", "Drop everything, we need it this very minute."]},
     ["can wait for months", "within weeks", "within a day", "at once"], "How urgent is it?"),
    ({"frames": ["The service was <x>.", "My stay in {city}: <x>.", "I found the concert of {name} <x>."],
      "0": ["dreadful", "the worst ever", "an utter disaster"], "1": ["rather poor", "below what I hoped", "a bit disappointing"],
      "2": ["average", "neither good nor bad", "so-so"], "3": ["quite good", "nice", "better than I hoped"],
      "4": ["outstanding", "the best ever", "absolutely perfect"]},
     ["very bad", "bad", "middling", "good", "very good"], "How pleased is the writer?"),
    ({"frames": ["Rating: <x>.", "{name} gave it <x>.", "I give <x>."],
      "0": ["1 star out of 5", "one of five points"], "1": ["2 stars out of 5", "two of five points"], "2": ["3 stars out of 5", "three of five points"],
      "3": ["4 stars out of 5", "four of five points"], "4": ["5 stars out of 5", "all five points"]},
     ["one star", "two stars", "three stars", "four stars", "five stars"], "How many stars?"),
    ({"frames": ["<x> of the 100 seats are taken.", "Tickets sold for the hall of 100: <x>."],
      "0": ["0", "None"], "1": ["9", "12", "7"], "2": ["48", "51", "53"], "3": ["91", "95", "88"], "4": ["100", "All 100"]},
     ["empty", "a few", "about half", "nearly full", "full"], "How full is the hall?"),
    ({"frames": ["It will <x> rain on {day}.", "{name} will <x> come on {day}."],
      "0": ["certainly not", "by no means"], "1": ["hardly", "probably not"], "2": ["perhaps", "maybe"], "3": ["probably", "most likely"],
      "4": ["certainly", "without any doubt"]},
     ["impossible", "unlikely", "possible", "likely", "certain"], "How likely is it?"),
    ({"frames": ["<x>", "Dear support, <x>"],
      "0": ["thank you so much, you are wonderful.", "many thanks for the kind help, I am glad."],
      "1": ["could you tell me where I find the form?", "I have a question on the form."],
      "2": ["this is the second time I ask, I am getting impatient.", "I am not amused that it is wrong again."],
      "3": ["this is an outrage, you are thieves and liars!", "I have had enough of you idiots, shame on you!"]},
     ["friendly", "neutral", "annoyed", "furious"], "How angry is the writer?"),
    ({"frames": ["{name} has cooked <x>.", "Experience with ovens: <x>."],
      "0": ["never in life", "none at all"], "1": ["for a few weeks", "since last month"], "2": ["for some three years", "for about four years"],
      "3": ["for thirty years, as a chef", "all life long, by trade"]},
     ["none", "a beginner", "some years", "an expert"], "How much experience is there?"),
]  # fmt: skip
