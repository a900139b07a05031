"""Sets of options that crossed.py asks of any text: topics, kinds of document, languages, tools, teams, wishes, tones.

Each set is what the questions are, and for every option its names, the usual one first, with a description."""

OptionSet = tuple[list[str], dict[str, str]]  # questions; names parted by "/", description

OPTION_SETS: dict[str, OptionSet] = {
    "topic": (["What is the text about?", "Topic?", "Choose the subject.", "Which section does it belong in?"], {
        "sport/athletics/games": "Matches, teams and players", "politics/government": "Parliaments, parties and elections",
        "health/medicine": "Illness, doctors and treatment", "science/research": "Studies and discoveries",
        "technology/computing": "Computers, software and devices", "finance/money/banking": "Banks, payments and markets",
        "travel/tourism": "Trips, flights and hotels", "food/cooking": "Dishes, recipes and restaurants",
        "education/school": "Lessons, pupils and exams", "law/legal matters": "Courts, contracts and crime",
        "music": "Songs, bands and concerts", "film/cinema/movies": "Films and the people who make them",
        "nature/environment": "Animals, plants and climate", "fashion/clothing": "Clothes and how they fit",
        "religion/faith": "Belief and worship", "history": "What happened long ago", "cars/motoring": "Driving and repair of cars",
        "housing/home": "Flats, rent and furniture", "family": "Parents, children and relatives", "weather": "Rain, sun and wind",
        "work/jobs": "Pay, colleagues and employers", "shopping/retail": "Buying and selling goods"}),
    "document": (["What kind of document is this?", "Document type", "Classify the document."], {
        "invoice/bill": "Asks for payment of what was supplied", "contract/agreement": "Sets out what parties owe one another",
        "email/letter/message": "Somebody writes to somebody", "recipe": "How to cook a dish", "news article/report": "Tells what happened",
        "review/critique": "Judges a product or a work", "résumé/cv": "Somebody's career", "manual/instructions": "How to use something",
        "log/log line": "Written by a program as it runs", "source code/program": "Text in a programming language",
        "advertisement/promotion": "Wants to sell something", "poem/verse": "Lines of poetry", "minutes/meeting notes": "What was said at a meeting",
        "question": "Somebody wants to know something", "joke": "Meant to make people laugh", "policy/terms": "Rules that hold for users",
        "headline/title": "The line above an article", "definition/encyclopedia entry": "Explains a term", "story/fiction": "An invented tale"}),
    "programming": (["Which programming language or tool is it about?", "Tag the question.", "Technology?"], {
        "python": "Indented scripts, pip and notebooks", "java": "Classes on the virtual machine", "c": "Pointers and header files",
        "c++": "Templates and the standard library", "c#/.net": "Microsoft's managed language", "javascript/js": "Scripts of web pages",
        "sql/database": "Queries of tables", "bash/shell": "Commands in a terminal", "php": "Scripts on a web server", "ruby/rails": "Gems and controllers",
        "haskell": "Pure functions and types", "matlab": "Matrices and plots", "excel/spreadsheet": "Cells and formulas", "git": "Commits and branches",
        "wordpress": "Themes and plugins of a blog", "rust": "Ownership and crates", "go/golang": "Goroutines and modules", "html/css": "Markup and styles"}),
    "language": (["Which language is the text in?", "Language?", "Written in"], {
        "English": "", "German/Deutsch": "", "French/français": "", "Spanish/español": "", "Italian/italiano": "", "Dutch": "", "Portuguese": "",
        "Polish": "", "Turkish": "", "Russian": "", "Arabic": "", "Chinese": "", "Japanese": "", "Latin": "", "Swedish": ""}),
    "tool": (["Which tool should the assistant call?", "Pick the tool.", "Next call"], {
        "web_search/search_web": "Looks something up on the internet", "calculator/do_math": "Works out numbers", "calendar/add_event": "Plans dates and reminders",
        "send_email/mail": "Writes to somebody", "play_music/music_player": "Plays songs", "get_weather/weather": "Tells the forecast", "translate": "Puts a text into another language",
        "book_flight/flights": "Finds and books flights", "database_query/run_sql": "Reads tables", "file_reader/read_file": "Opens a file", "set_alarm/timer": "Rings at a time",
        "transfer_money/payments": "Moves money between accounts", "navigation/maps": "Finds the way", "order_food/delivery": "Brings a meal", "smart_home/lights": "Switches lamps and heating",
        "none/no tool": "The assistant answers by itself"}),
    "team": (["Which team should handle this?", "Route it.", "Who takes over?", "Queue"], {
        "billing/accounts/finance": "Charges, invoices and refunds", "technical support/tech/engineering": "Faults of the product", "shipping/delivery/logistics": "Parcels on their way",
        "sales": "Offers and new customers", "legal/compliance": "Law and contracts", "human resources/people team/hr": "Staff, pay and leave", "security/fraud": "Theft, misuse and attacks",
        "returns": "Goods sent back", "marketing/press": "Campaigns and the public", "account management/user accounts": "Log-in and personal data", "facilities/building": "Rooms, keys and heating",
        "product/feature requests": "Ideas for what to build", "moderation/trust and safety": "Abuse between users", "other/none of these": "Nothing of the kind"}),
    "intent": (["What does the writer want?", "Intent?", "Purpose of the message", "Why do they write?"], {
        "complain/complaint": "Voices displeasure", "ask/question/enquiry": "Wants to know something", "order/buy/purchase": "Wants to get something", "cancel/cancellation": "Wants to stop something",
        "thank/praise/compliment": "Is pleased and says so", "report a problem/bug report": "Says that something is broken", "change/update": "Wants something to be different", "book/reserve": "Wants a place or a date",
        "greet/small talk": "Just says hello", "give an opinion/opinion": "Judges something", "inform/tell/statement": "States a fact", "command/give an order": "Tells a machine what to do",
        "warn/warning": "Points to a danger", "advertise/promote": "Wants to sell something"}),
    "tone": (["What is the tone?", "How does the writer feel?", "Mood"], {
        "angry/furious": "Full of anger", "happy/joyful/glad": "In a good mood", "sad/unhappy": "In a low mood", "afraid/anxious": "Fears something", "surprised/astonished": "Did not expect it",
        "neutral/matter of fact": "Shows no feeling", "grateful/thankful": "Gives thanks", "disgusted/repelled": "Finds it revolting", "curious/interested": "Wants to know more", "amused/funny": "Finds it comic",
        "disappointed/let down": "Hoped for more", "proud": "Pleased with what was done"}),
    "speaker": (["Who wrote this, most likely?", "Author?", "Source of the text"], {
        "customer/client": "Uses or buys something", "journalist/reporter": "Writes for a newspaper", "programmer/developer": "Writes software", "program/machine": "No person wrote it", "scientist/researcher": "Reports on a study",
        "lawyer": "Writes contracts or policies", "pupil/student": "Is learning", "film critic/reviewer": "Judges works", "advertiser/marketer": "Wants to sell", "attacker/spammer": "Wants to trick the reader"}),
    "action": (["What should be done with it?", "Decide.", "Next step"], {
        "reply/answer": "Somebody should write back", "ignore/no action": "Nothing needs to be done", "escalate/call a manager": "Somebody with more power should see it", "delete/remove": "It should not stay up",
        "archive/file": "Keep it for the records", "fix/repair": "Something is broken", "refund/pay back": "Money should go back", "forward/pass on": "Somebody else should get it", "publish/approve": "It may be shown to all"}),
}  # fmt: skip

# yes/no questions and scales that can be asked of any text
NOUL_QUESTIONS = [
    "Is this a question?", "Is the writer pleased?", "Does it name a person?", "Does it name a place?", "Is it about money?", "Is it about a computer?",
    "Is it rude?", "Is something broken?", "Does the writer ask for help?", "Is it an instruction to a machine?", "Is it about food?", "Is it urgent?",
    "Would a child understand it?", "Is it an advertisement?", "Does it state an opinion?", "Is it about something that happened in the past?",
    "Is it about travel?", "Is somebody thanked?", "Is it safe to show to everybody?", "Does it contain a number?", "Is it about health?", "Is it sad?",
]  # fmt: skip
SCALES = [
    ("How urgent is it?", ["not urgent", "somewhat urgent", "very urgent"]), ("How positive is it?", ["very negative", "negative", "neutral", "positive", "very positive"]),
    ("How formal is it?", ["casual", "neutral", "formal"]), ("How hard is it to read?", ["easy", "medium", "hard"]),
    ("How rude is it?", ["polite", "neutral", "rude", "insulting"]), ("How angry is the writer?", ["calm", "annoyed", "angry"]),
    ("How personal is it?", ["not at all", "a little", "very"]), ("How certain is the writer?", ["unsure", "rather sure", "certain"]),
]  # fmt: skip
