"""The grammar of the training prompts; every phrase here was written for this project.

A rule is a list of forms; a form names other rules in braces. `prompts.py` expands them.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split("|")]


RULES: dict[str, list[str]] = {
    "topic": _words(
        """tides|fog|thunderstorms|sand dunes|hot springs|caves|waterfalls|wetlands|meteor showers|
        eclipses|the Milky Way|Jupiter|space telescopes|rockets|astronauts|sound waves|echoes|heat|
        friction|levers|pulleys|lenses|mirrors|lasers|radar|sonar|ice skating|swords|kites|sails|
        canals|dams|tunnels|lifts|steam engines|trams|ferries|hot air balloons|helicopters|tyres|
        stoves|fridges|light bulbs|zips|umbrellas|spectacles|pencils|ink|paint|soap|candles|rope|
        leather|wool|silk|concrete|bricks|steel|gold|copper|salt|sugar|vinegar|honey|olive oil|
        noodles|pancakes|pickles|ice cream|apples|bananas|pumpkins|garlic|pepper|cinnamon|school
        lunches|picnics|markets|post offices|hospitals|courts of law|parliaments|passports|borders|
        treaties|pirates|knights|explorers|the Aztecs|the Ottoman Empire|ancient Greece|castles in
        Japan|the Great Wall|the Wright brothers|Marie Curie|Leonardo da Vinci|Ada Lovelace|
        typewriters|telegraphs|barcodes|spreadsheets|databases|open source|web browsers|e-mail|
        cameras|maps on phones|drones|3D printers|chatbots|random numbers|infinity|symmetry|
        triangles|percentages|averages|graphs|codes and ciphers|riddles|optical illusions|habits|
        laughter|patience|teamwork|arguments|apologies|first impressions|shyness|boredom|homework|
        exams|handwriting|essays|diaries|libraries of the future|comics|fairy tales|haiku|opera|
        choirs|violins|trumpets|film music|puppets|masks|origami|pottery|knitting|carpentry|
        bird watching|fishing|rowing|tennis|judo|marathons|cycling to work|sleepovers|balconies|
        house plants|bees|ants|spiders|frogs|owls|bats|foxes|horses|sheep|octopuses|sharks|turtles|
        mammoths|moss|ferns|oak trees|cacti|seaweed|compost|drought|floods|clean water|wind power|
        electric cars|public transport|rents|pensions|loans|prices|tips in restaurants|volunteering|
        neighbours|twins|grandparents|toddlers|teenagers|allergies|vitamins|teeth|bones|skin|
        blood pressure|headaches|posture|jogging|naps"""
    ),
    "audience": _words(
        """a curious child|someone in a hurry|my grandfather|a class of teenagers|a total beginner|
        a visitor from another planet|an expert from another field|a tired student"""
    ),
    "name": _words(
        """Alma|Bruno|Chidi|Dora|Emre|Farah|Gus|Hilde|Ivo|Juna|Kenji|Lotte|Mateo|Noor|Olga|Paulo|
        Quinn|Rosa|Sami|Tilda|Uma|Viktor|Wanda|Xavi"""
    ),
    "city": _words(
        """Porto|Osaka|Accra|Montreal|Vienna|Quito|Seoul|Naples|Bergen|Tunis|Riga|Cork|Ghent|Pune|
        Hobart|Valencia"""
    ),
    "job": _words(
        """baker|plumber|translator|beekeeper|train conductor|dentist|tailor|web designer|gardener|
        surveyor|midwife|sound engineer|teacher|welder|veterinarian"""
    ),
    "object": _words(
        """a folding bicycle|an electric kettle|a wool blanket|a chess set|a pocket knife|a tent|
        a second-hand piano|a garden hose|running shoes|a telescope|a fountain pen|a rice cooker|
        a wooden ladder|a sewing machine|an alarm clock|a pair of skis"""
    ),
    "food": _words(
        """beans|cabbage|tofu|trout|pasta|oats|pears|beetroot|cheese|leftover bread|courgettes|
        chicken|barley|sweet potatoes|walnuts"""
    ),
    "country": _words(
        """Chile|Iceland|Ghana|Nepal|Austria|Turkey|Ireland|Cuba|Finland|Thailand|Tunisia|Croatia|
        South Korea|Bolivia|Estonia"""
    ),
    "few": _words("two|three|four|five|six|seven"),
    "day": _words("Tuesday|Thursday|Saturday|Sunday|next week|tomorrow"),
    "number": _words("14|18|22|27|36|45|52|64|75|84|99|110|132|144|175|210"),
    "digit": _words("2|3|4|5|6|7|8|9|12"),
    "place": _words(
        """a harbour at dawn|an attic full of clocks|the last bus of the night|a village under
        snow|a laundrette|a lighthouse|a bookshop that never closes|an empty theatre|a cable car|
        a monastery garden|a repair shop for toys|a raft on a wide river|the kitchen of a palace"""
    ),
    "mystery": _words(
        """a key that fits every lock|a postcard from next year|a suitcase that hums|a painted
        door|a cat with two shadows|a music box|a borrowed coat|an empty birdcage|a torn ticket|
        a melody nobody can forget|a glass eye|a talking kettle"""
    ),
    "genre": _words("funny|sad|scary|hopeful|magical|historical|romantic|very short"),
    "chat": _words(
        """Can you explain {topic} to {audience}?|How would you describe {topic} to {audience}?|
        Tell me about {topic}.|What do most people get wrong about {topic}?|Where do {topic} come
        up in daily life?|Name {few} good questions one could ask about {topic}.|Give {few} facts
        about {topic} that fit on a poster.|What is the link between {topic} and {topic}?|Which is
        more useful to know about, {topic} or {topic}? Give reasons.|Write {few} sentences about
        {topic}.|Write a limerick about {topic}.|Write a {genre} scene in which {topic} play a
        part.|Plan a lesson of half an hour on {topic}.|Make a mind map about {topic} as a nested
        list.|What vocabulary does one need to talk about {topic}?|Argue for and against spending
        public money on {topic}.|How have {topic} changed over the last hundred years?|Interview
        an expert on {topic}: write questions and answers.|What should {audience} know about
        {topic}?|Summarise what is known about {topic}.|Start a newsletter on {topic} with a
        short welcome.|Imagine that {topic} did not exist. What would be different?|Suggest a
        small project about {topic} for a weekend.|What makes {topic} hard to understand?|
        Write a {genre} story about {name}, {mystery} and {place}.|{name} enters {place} and sees
        {mystery}. What happens next?|Write the first page of a book called '{mystery}'. It begins
        in {place}.|Let {name} and {name} argue about {mystery}.|Describe {place} with all five
        senses.|Invent {few} titles for a {genre} story set in {place}.|Finish this: 'When {name}
        opened the parcel, there was {mystery} inside.'|Write a letter from {name} to {name} about
        {place}.|How do I choose {object}?|How long should {object} last, and how do I look after
        it?|Write an advert for {object}.|{name} wants to return {object}. Write the message to
        the shop.|What would you cook from {food} and {food}?|Is it healthy to eat {food} every
        day?|Write out a simple recipe with {food} for {few} people.|What goes well with {food}?|
        I will be in {city} for {few} days. What should I do there?|Compare living in {city} with
        living in {city}.|What is {country} famous for?|Give me {few} facts about {country}.|What
        do people eat in {country}?|Which sights in {country} are worth a detour?|What does a {job}
        do all day?|Which skills does a {job} need?|Write a job advert for a {job} in {city}.|I am
        a {job} and want to become a {job}. What do I need to learn?|Write a short message to my
        team: the meeting moves to {day}.|Ask my landlord politely to repair the heating before
        {day}.|Invite {name} to dinner on {day}.|Help me say no to a friend who wants to borrow
        {object}.|What is {number} minus {digit}?|How much is {number} times {digit}?|Split
        {number} sweets among {digit} children. How many does each get, and how many remain?|A
        cyclist rides {number} kilometres in {digit} hours. How fast is that?|Solve {digit}x =
        {number} and show the steps.|What is {digit} percent of {number}?"""
    ),
    "language": _words(
        "Python|Python|Python|Python|Python|Python|JavaScript|TypeScript|Java|C|C++|Rust|Go|Ruby"
    ),
    "task": _words(
        """adds up the even numbers of a list|finds the shortest string in a list|counts lines in a
        file|removes blanks at both ends of a string|prints the numbers from one to a hundred|
        tells whether a number is a perfect square|finds all divisors of a number|rounds prices to
        two decimals|turns minutes into hours and minutes|makes every second letter upper case|
        splits a sentence into words|joins strings with commas|swaps two variables|draws a square of
        hashes|finds the median|sorts names by length|looks up a phone number|checks whether two
        lists are equal|zips two lists together|picks a random element|shuffles a deck of cards|
        counts votes|keeps a high score table|models a library with books and loans|models a traffic
        light|converts miles to kilometres|translates digits to words|reads numbers until the user
        types stop|guesses a number between one and a hundred|builds a frequency table of words|
        finds the first repeated letter|replaces tabs by spaces|computes compound interest|
        computes a dot product|finds the day of the week of a date|walks through a binary tree|
        searches a grid for a path|parses a URL|encodes text in Morse code|
        wraps text at eighty columns|retries a failing call three times|
        reads settings from a JSON file|writes a CSV file|validates a date|
        adds a timestamp to a log line|counts how many days are left until New Year|
        multiplies two fractions|finds the largest common prefix of a list of words|
        limits a value to a range"""
    ),
    "concept": _words(
        """a while loop|a dictionary|a set|slicing|an f-string|a lambda|inheritance|a closure|an
        iterator|a module|a virtual environment|an exception|a unit test|a callback|a promise|an
        interface|a generic function|a switch statement|a linked list|a heap|big-O notation|
        version control|a merge conflict|a primary key|an SQL join|an index in a database|a foreign
        key|a CSS selector|a flex box|an HTML form|a cookie|an HTTP status code|a shell pipe|an
        environment variable|a cron job|a Makefile|a regular expression|a race condition|a mutex"""
    ),
    "snippet": [
        "def area(radius):\n    return 3.14159 * radius ** 2",
        "def longest(words):\n    best = ''\n    for w in words:\n        if len(w) > len(best):\n"
        "            best = w\n    return best",
        "total = 0\nwhile total < 50:\n    total += 7\nprint(total)",
        "class Counter:\n    def __init__(self):\n        self.value = 0\n\n"
        "    def tick(self):\n        self.value += 1",
        "const names = ['Uma', 'Ivo', 'Rosa'];\nfor (const who of names) {\n"
        "  console.log(`Hi ${who}`);\n}",
        "def split_bill(amount, people):\n    share = amount / people\n    return round(share, 2)",
        "ages = {'Noor': 31, 'Gus': 45}\nfor name, age in ages.items():\n"
        "    print(name, 'is', age)",
        "fn square(x: i32) -> i32 {\n    x * x\n}\n\nfn main() {\n"
        '    println!("{}", square(9));\n}',
        "def clean(lines):\n    out = []\n    for line in lines:\n        line = line.strip()\n"
        "        if line != '':\n            out.append(line)\n    return out",
        "SELECT city, COUNT(*)\nFROM visits\nGROUP BY city\nORDER BY city;",
        "int max(int a, int b) {\n    if (a > b) {\n        return a;\n    }\n    return b;\n}",
    ],
    "code": _words(
        """Write {language} code that {task}.|I need a {language} function that {task}. Keep it
        short.|How can I write something in {language} that {task}?|Give me a complete {language}
        example that {task}, with a line of explanation for each step.|Write a {language} function
        that {task}, and two calls that show what it does.|Write a test in {language} for code
        that {task}.|Solve this in {language} without any library: something that {task}.|What is
        {concept}? Show a small example.|When would I use {concept}?|Explain {concept} with code
        in {language}."""
    )
    + [
        "What does this print, and why?\n\n{snippet}",
        "Go through this code line by line:\n\n{snippet}",
        "Write this again in {language}:\n\n{snippet}",
        "Print this code once more with better names:\n\n{snippet}",
        "Put a comment above each line:\n\n{snippet}",
        "Is there a mistake in here? Show the code again, corrected if needed.\n\n{snippet}",
        "Add input checks to this code and print all of it:\n\n{snippet}",
    ],
    "subject": _words(
        """The choir of {city}|A {job} from {city}|{name} and {name}|My cousin {name}|
        The night shift|A team of divers|The oldest shop in the street|The school orchestra|
        A careful {job}|The new bridge-keeper|{name}, a {job},|The island's only {job}"""
    ),
    "act": _words(
        """bought {object} at an auction|rebuilt the engine of a ferry|counted all the storks in
        the valley|lost the keys to the town hall|served soup to {number} guests|learned to play
        the accordion|moved the whole archive by hand|turned a garage into a small museum|walked
        from {city} to the sea|sent {number} postcards in a single month|found {mystery} behind a
        cupboard|taught the parrot of the hotel to whistle"""
    ),
    "time": _words(
        """on the first warm day of the year|in {few} short weeks|while the power was out|in the
        autumn of 1987|the day before the festival|after a long quarrel|between two storms|at
        the very last moment|for the third time|without telling anyone"""
    ),
    "comment": _words(
        """People still talk about it at the bus stop.|The bill came to {number} euros.|{name} had
        warned everybody, but nobody had listened.|Two reporters came, and both left early.|It
        rained, of course.|The children thought it was the best day of their lives.|Afterwards
        there was cake with {food}.|What became of {object} is not known.|A plaque now marks the
        spot.|'I would do it again,' said {name}.|In {city} this would hardly be news.|The
        insurance paid for half of it.|A second attempt is planned for {day}.|Only the dog seemed
        unimpressed.|Some say the story has grown with the years."""
    ),
    "sentence": ["{subject} {act} {time}."] * 5 + ["{comment}"] * 4,
    "person": ["{name}; {number}; {city}; {job}"],
    "rework": _words(
        """Copy this text word for word:|Repeat this exactly as it is:|
        Type this out again, unchanged:|Check this for mistakes and write it out in full:|Quote
        this:|Write all of this again, with another name for the main thing in it:|Say this in plain language:|Make this sound more
        official:|Correct the spelling and grammar of this text, if anything is wrong:|What is
        the gist of this, in one sentence?|List the main points:|Put this into the future tense:|
        Tell this as if you had been there:|Make this funnier:|Cut this to half its length:|Give
        this a headline, then repeat the text:|Which sentence matters most? Quote it:|Put each
        sentence on a line of its own:|Rephrase this:|Print this text in upper case:|Who does what
        in this text? Answer with quotes:|Improve the flow and show the whole text:|Add one
        sentence at the end and print everything:"""
    ),
    "recode": _words(
        """Show this code again:|Print the whole code once more, with a comment above each line:|
        Give the function a better name and print all of the code:|Add a docstring and show the
        complete code:|Rename one of the variables in this code, and leave the rest as it is:|
        Fix this code if it needs fixing, and print it in full:|Copy this code, then add a call of
        it at the end:|Explain this code:|Write this code a little shorter:|Replace all double
        quotes in this code by single ones:|Change a number in this code and print it:"""
    ),
    "relist": _words(
        """Number these items|Put these in alphabetical order|Write these as a bulleted list|Turn
        these into a JSON list|Write these one per line, in reverse order|Sort these by length"""
    ),
    "retable": _words(
        """Turn these lines (name; age; city; job) into a Markdown table:|Convert these lines into
        JSON objects with name, age, city and job:|Introduce each of these people in a sentence:|
        Repeat these lines with commas instead of semicolons:"""
    ),
}
