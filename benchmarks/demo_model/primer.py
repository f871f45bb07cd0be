"""The primer: simple texts, written for the demo model, in which much follows from what was said.

A model this small cannot know the library by heart, but it can learn a small world well: modules
that keep things in lists and files, well-known short functions, and questions about both. A name is
chosen once and then used, so that trunk and head are sure of most tokens and unsure of a few, as
large models are on ordinary text.
"""

from __future__ import annotations

import random
from string import Template

_THINGS = """
apple bird boat book bottle box bridge camera candle car chair city clock cloud coat coin color
country course cup customer desk dog door driver engine event farm field file flower game garden
group guest horse hotel house image island item job key lake lamp letter line machine map market
message meal name node note number order page painting paper part person phone picture plane plant
player point product project question record report river road robot room sensor server ship shop
signal song star station step stone store student table task team teacher ticket tool tower town
toy train tree user value village visitor wheel window word worker
"""
_MEASURES = "age cost depth height length level price rank score size speed time weight width year"
THINGS, MEASURES = _THINGS.split(), _MEASURES.split()
IRREGULAR = {"person": "people", "country": "countries", "city": "cities", "box": "boxes"}

FUNCTIONS = (
    '''
def count_$plural($plural):
    """Return the number of $plural."""
    return len($plural)
''',
    '''
def total_$measure($plural):
    """Return the total $measure of the $plural."""
    total = 0
    for $thing in $plural:
        total += $thing.$measure
    return total
''',
    '''
def average_$measure($plural):
    """Return the average $measure of the $plural."""
    if not $plural:
        return 0
    return total_$measure($plural) / len($plural)
''',
    '''
def largest_$measure($plural):
    """Return the $thing with the largest $measure."""
    return max($plural, key=lambda $thing: $thing.$measure)
''',
    '''
def smallest_$measure($plural):
    """Return the $thing with the smallest $measure."""
    return min($plural, key=lambda $thing: $thing.$measure)
''',
    '''
def sort_by_$measure($plural):
    """Return the $plural sorted by $measure."""
    return sorted($plural, key=lambda $thing: $thing.$measure)
''',
    '''
def find_$thing($plural, name):
    """Return the $thing with the given name, or None."""
    for $thing in $plural:
        if $thing.name == name:
            return $thing
    return None
''',
    '''
def remove_$thing($plural, name):
    """Return the $plural without the one of the given name."""
    return [$thing for $thing in $plural if $thing.name != name]
''',
    '''
def filter_$plural($plural, limit):
    """Return the $plural whose $measure is at least limit."""
    result = []
    for $thing in $plural:
        if $thing.$measure >= limit:
            result.append($thing)
    return result
''',
    '''
def group_by_$measure($plural):
    """Return a dictionary from each $measure to a list of $plural."""
    groups = {}
    for $thing in $plural:
        groups.setdefault($thing.$measure, []).append($thing)
    return groups
''',
    '''
def ${thing}_names($plural):
    """Return the names of the $plural."""
    return [$thing.name for $thing in $plural]
''',
    '''
def print_$plural($plural):
    """Print the name and the $measure of each $thing."""
    for $thing in $plural:
        print($thing.name, $thing.$measure)
''',
    '''
def read_$plural(path):
    """Read the $plural from a JSON file."""
    with open(path) as file:
        data = json.load(file)
    return [$Class(**fields) for fields in data]
''',
    '''
def write_$plural(path, $plural):
    """Write the $plural to a JSON file."""
    data = [$thing.to_dict() for $thing in $plural]
    with open(path, "w") as file:
        json.dump(data, file)
''',
)
CLASS = '''
class $Class:
    """A $thing with a name and a $measure."""

    def __init__(self, name, $measure):
        self.name = name
        self.$measure = $measure

    def __repr__(self):
        return f"$Class({self.name!r}, {self.$measure!r})"

    def to_dict(self):
        """Return the name and the $measure as a dictionary."""
        return {"name": self.name, "$measure": self.$measure}
'''
MAIN = '''
def main():
    """Print the $plural of a file."""
    $plural = read_$plural(sys.argv[1])
    print_$plural($plural)


if __name__ == "__main__":
    main()
'''
ABOUT = (
    "A $thing has a name and a $measure.",
    "To count the $plural, call count_$plural($plural).",
    "To find a $thing by its name, call find_$thing($plural, name).",
    "To sort the $plural by $measure, call sort_by_$measure($plural).",
    "To read the $plural from a file, call read_$plural(path).",
    "To write the $plural to a file, call write_$plural(path, $plural).",
    "The function total_$measure returns the total $measure of the $plural.",
    "The function print_$plural prints the name and the $measure of each $thing.",
)
ASKED = (
    ("that counts the $plural", 0),
    ("that returns the total $measure of the $plural", 1),
    ("that returns the average $measure of the $plural", 2),
    ("that returns the $thing with the largest $measure", 3),
    ("that returns the $thing with the smallest $measure", 4),
    ("that sorts the $plural by $measure", 5),
    ("that finds a $thing by its name", 6),
    ("that removes a $thing by its name", 7),
    ("that returns the names of the $plural", 10),
    ("that prints the $plural", 11),
    ("that reads the $plural from a file", 12),
    ("that writes the $plural to a file", 13),
)

# Functions that everybody has written once: (what it does, code).
WELL_KNOWN = (
    (
        "computes the factorial of n",
        '''def factorial(n):
    """Return the factorial of n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
''',
    ),
    (
        "returns the n-th Fibonacci number",
        '''def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
''',
    ),
    (
        "tells whether n is prime",
        '''def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True
''',
    ),
    (
        "returns the greatest common divisor",
        '''def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a
''',
    ),
    (
        "reverses a string",
        '''def reverse(text):
    """Return the text in reverse order."""
    return text[::-1]
''',
    ),
    (
        "tells whether a text is a palindrome",
        '''def is_palindrome(text):
    """Return True if the text reads the same in both directions."""
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]
''',
    ),
    (
        "sorts a list with quicksort",
        '''def quicksort(items):
    """Return the items in ascending order."""
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [x for x in items[1:] if x < pivot]
    larger = [x for x in items[1:] if x >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)
''',
    ),
    (
        "searches a sorted list",
        '''def binary_search(items, target):
    """Return the index of target in the sorted items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
''',
    ),
    (
        "counts the words of a text",
        '''def count_words(text):
    """Return a dictionary from each word to its count."""
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts
''',
    ),
    (
        "reads the lines of a file",
        '''def read_lines(path):
    """Return the lines of a file without their line ends."""
    with open(path) as file:
        return [line.rstrip("\\n") for line in file]
''',
    ),
    (
        "flattens a list of lists",
        '''def flatten(lists):
    """Return one list with the items of all lists."""
    return [item for items in lists for item in items]
''',
    ),
    (
        "removes duplicates from a list",
        '''def unique(items):
    """Return the items without duplicates, in their order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result
''',
    ),
    (
        "parses the command line",
        '''def parse_args(args=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="the file to read")
    parser.add_argument("--verbose", action="store_true", help="print more")
    return parser.parse_args(args)
''',
    ),
    (
        "implements a stack",
        '''class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Remove the top item and return it."""
        return self.items.pop()

    def is_empty(self):
        """Return True if there are no items."""
        return not self.items
''',
    ),
    (
        "implements a queue",
        '''class Queue:
    """A queue of items."""

    def __init__(self):
        self.items = []

    def put(self, item):
        """Add an item at the end."""
        self.items.append(item)

    def get(self):
        """Remove the first item and return it."""
        return self.items.pop(0)

    def is_empty(self):
        """Return True if there are no items."""
        return not self.items
''',
    ),
)
# Names of the library and what they do, in one sentence.
GLOSSARY = {
    "os.path.join": "It joins path components with the separator of the system.",
    "os.listdir": "It returns the names of the files in a folder.",
    "os.path.exists": "It returns True if the path exists.",
    "os.makedirs": "It creates a folder and the folders above it.",
    "json.load": "It reads a value from a JSON file.",
    "json.dump": "It writes a value to a JSON file.",
    "json.loads": "It reads a value from a JSON text.",
    "json.dumps": "It returns a value as a JSON text.",
    "random.choice": "It returns a random item of a sequence.",
    "random.shuffle": "It puts the items of a list into a random order.",
    "time.sleep": "It waits for a number of seconds.",
    "math.sqrt": "It returns the square root of a number.",
    "re.search": "It finds the first place in a text that matches a pattern.",
    "re.sub": "It replaces what matches a pattern in a text.",
    "shutil.copy": "It copies a file to another path.",
    "subprocess.run": "It runs a command and waits until it ends.",
    "collections.Counter": "It is a dictionary that counts items.",
    "collections.OrderedDict": "It is a dictionary that remembers the order of its keys.",
    "collections.deque": "It is a list that is fast at both ends.",
    "contextlib.contextmanager": "It turns a generator function into a context manager.",
    "functools.lru_cache": "It keeps the results of a function, so that they are computed once.",
    "itertools.chain": "It joins several iterables into one.",
    "argparse.ArgumentParser": "It reads the options of the command line.",
    "argparse.ArgumentParser.add_argument": "It adds an argument to the parser.",
    "logging": "The logging module writes messages of a program, with a level and a time.",
    "threading.Lock": "It is a lock that one thread can hold at a time.",
    "threading.Thread": "It runs a function in a thread of its own.",
    "datetime.datetime.now": "It returns the present date and time.",
    "pathlib.Path": "It is a path with methods to read, write and list files.",
    "lambda": "A lambda is a small function without a name, written as one expression.",
    "yield": "The yield statement gives a value to the caller of a generator and waits.",
    "the if statement": "The if statement runs its block only if the condition is true.",
    "the for statement": "The for statement runs its block once for each item of an iterable.",
    "the while statement": "The while statement runs its block as long as the condition is true.",
    "the with statement": "The with statement opens a resource and closes it after its block.",
    "the try statement": "The try statement runs its block and handles exceptions.",
}
GLOSSARY_QUESTIONS = (
    "What does $name do?",
    "What does $name do in Python?",
    "Explain $name.",
    "What is $name for?",
    "Tell me about $name.",
    "How do I use $name?",
)
CODE_QUESTIONS = ("Write a Python function", "Write a function", "Show me a Python function")


def plural(thing: str) -> str:
    """The English plural of one of `THINGS`."""
    return IRREGULAR.get(thing, thing + "s")


def words(rng: random.Random) -> dict[str, str]:
    """What one text is about."""
    thing = rng.choice(THINGS)
    return {
        "thing": thing,
        "plural": plural(thing),
        "Class": thing.capitalize(),
        "measure": rng.choice(MEASURES),
    }


def fill(text: str, about: dict[str, str]) -> str:
    """`text` with its names put in."""
    return Template(text).substitute(about)


def module(rng: random.Random) -> str:
    """A Python file about one thing: always in the same order, some functions left out."""
    about = words(rng)
    parts = [f'"""Functions for {about["plural"]}."""\n\nimport json\nimport sys\n', CLASS]
    parts += [text for text in FUNCTIONS if rng.random() < 0.6]
    if rng.random() < 0.7:
        parts.append(MAIN)
    return fill("\n".join(parts), about)


def notes(rng: random.Random) -> str:
    """English sentences about one thing."""
    about = words(rng)
    lines = [line for line in ABOUT if rng.random() < 0.8]
    return fill("\n".join([f"# {about['plural'].capitalize()}\n", *lines, ""]), about)


def snippets(rng: random.Random) -> str:
    """A few of the well-known functions, as a file has them."""
    return "\n\n".join(code for _, code in rng.sample(WELL_KNOWN, 4))


def question(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    kind = rng.randrange(4)
    if kind < 2:
        name, answer = rng.choice(list(GLOSSARY.items()))
        return Template(rng.choice(GLOSSARY_QUESTIONS)).substitute(name=name), answer
    asks = rng.choice(CODE_QUESTIONS)
    if kind == 2:
        does, code = rng.choice(WELL_KNOWN)
        return f"{asks} that {does}.", f"```python\n{code}```"
    wish, index = rng.choice(ASKED)
    about = words(rng)
    code = FUNCTIONS[index].lstrip("\n")
    return fill(f"{asks} {wish}.", about), fill(f"```python\n{code}```", about)


def build(seed: int, count: int) -> list[list[tuple[str, str]] | str]:
    """`count` documents: plain texts, and chats as lists of (question, answer)."""
    rng = random.Random(f"primer/{seed}")
    made: list[list[tuple[str, str]] | str] = []
    for index in range(count):
        if index % 2:
            made.append([question(rng) for _ in range(rng.choice((1, 2, 3)))])
        else:
            made.append(rng.choice((module, module, notes, snippets))(rng))
    return made
