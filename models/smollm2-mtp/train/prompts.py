"""Prompts for sampling the target, composed by a small grammar.

Three classes, by how predictable their answers are: `chat` (open questions), `code`, and `copy`
(rework a text that stands in the prompt). A held-out twentieth of each class is never trained on,
and neither are the prompts of `UNSEEN`, which use no form of the grammar.
"""

from __future__ import annotations

import random
import re
from typing import TypedDict

from grammar import RULES


class Prompt(TypedDict):
    """What a user asks, with its class."""

    prompt: str
    cls: str
    split: str  # train, held or unseen


# Wordings that the grammar cannot produce: the honest, small test set.
UNSEEN: list[tuple[str, str]] = [
    ("chat", "My sourdough never rises in winter. Any idea why?"),
    ("chat", "Would a cat or a parrot suit a family that is away all day?"),
    ("chat", "How come the moon seems larger near the horizon?"),
    ("chat", "You are the captain of a snowbound train. Address the passengers."),
    ("chat", "I keep postponing my thesis. Be strict with me."),
    ("chat", "Do plants get sunburnt?"),
    ("chat", "What did sailors eat on long voyages before tins were invented?"),
    ("chat", "Settle a bet: is a tomato a fruit?"),
    ("chat", "Two buses leave at 7:10 and 7:25. I am ready at 7:15. How long do I wait?"),
    ("chat", "Please write a toast for the retirement of our caretaker."),
    ("chat", "Why does metal feel colder than wood in the same room?"),
    ("chat", "Which came first, the fork or the spoon, and how do we know?"),
    ("code", "My loop never ends. The counter is a string. Could that be it?"),
    ("code", "Show a context manager in Python that prints how long a block took."),
    ("code", "Bash one-liner to list the ten largest files under the current folder, please."),
    ("code", "A tiny web page with a button that counts its own clicks."),
    ("code", "Model a vending machine as an enum with transitions in Rust."),
    ("code", "How would I merge two dictionaries and sum the values of shared keys?"),
    ("copy", "Type this up neatly: 'tmrw 9am dentist, bring card, pick up Sami, buy eggs + milk'"),
    ("copy", "Turn 'the lift is broken again and nobody cares' into a courteous notice."),
    ("copy", "Return this date list in ISO form: 3 May 2021, 12 June 2022, 1 December 2023."),
    (
        "copy",
        "Swap the roles of teacher and pupil: 'The teacher asked a question. The pupil thought "
        "for a while, gave the wrong answer, and the teacher sighed.'",
    ),
    (
        "copy",
        "Translate into pirate speech: 'Good morning, dear passengers. Breakfast is served on the "
        "upper deck, and we shall reach the island before noon.'",
    ),
    ("copy", "Write this out again with a default of 10 for n:\n\ndef f(n):\n    return n + 1"),
]


# How a user's words may begin; the target goes on from there. The empty one leaves all to it.
OPENINGS: list[str] = [
    "", "", "", "", "", "", "", "", "", "",
    "Write a story about", "Write a poem", "Write a letter", "Write an email to", "Write a short",
    "Tell me a story", "Tell me about", "Explain how", "Explain why", "Explain the", "Describe a",
    "Describe the", "What is the difference between", "What are the", "What is", "What would happen",
    "Why do", "Why is", "How do", "How can I", "How does", "Give me some", "Give me a list of",
    "List the", "Compare", "Imagine", "Who was", "Should I", "Can you explain", "I need advice",
    "Summarize", "Help me plan", "Create a", "In your opinion,",
    "Write a Python function", "Write a Python program", "Write a Python class", "Write a function",
    "Write a JavaScript", "Write a C++ program", "Write a Java class", "Write an SQL query",
    "Write an HTML page", "Write a bash script", "Write code that", "Implement a", "In Python,",
    "How do I use", "Fix this code:", "Create a REST API",
]  # fmt: skip


def expand(form: str, rng: random.Random) -> str:
    """Replace each {rule} by a random form of that rule, and so on inside."""

    def choose(match: re.Match[str]) -> str:
        name = match.group(1)
        return expand(rng.choice(RULES[name]), rng) if name in RULES else match.group(0)

    return re.sub(r"\{([a-z]+)\}", choose, form)


def _passage(rng: random.Random) -> str:
    sentences = [expand("{sentence}", rng) for _ in range(rng.randint(2, 7))]
    return " ".join(s[0].upper() + s[1:] for s in sentences)


def quote(text: str, rng: random.Random) -> str | None:
    """A request to rework a part of `text`, of its first block of code if it has one."""
    if text.count("```") >= 2:
        code = text.split("```")[1].partition("\n")[2].strip("\n")
        return expand("{recode}", rng) + "\n\n" + code if 60 < len(code) < 700 else None
    sentences = re.split(r"(?<=[.!?:])(?=\s)", text)
    first = rng.randrange(max(1, len(sentences) // 2))
    passage = ""
    for sentence in sentences[first:-1]:  # the last one may be cut short
        if len(passage) + len(sentence) > 700 or (len(passage) > 200 and rng.random() < 0.25):
            break
        passage += sentence
    passage = passage.strip()
    return expand("{rework}", rng) + "\n\n" + passage if len(passage) > 100 else None


def _copy(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.74:
        return expand("{rework}", rng) + "\n\n" + _passage(rng)
    if kind < 0.87:
        items = rng.sample(RULES["topic"], rng.randint(4, 9))
        return expand("{relist}", rng) + ": " + ", ".join(items) + "."
    lines = [expand("{person}", rng) for _ in range(rng.randint(2, 5))]
    return expand("{retable}", rng) + "\n\n" + "\n".join(lines)


def compose(counts: dict[str, int], seed: int = 1) -> list[Prompt]:
    """`counts` distinct prompts of each class, shuffled, with a twentieth held out; then UNSEEN."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for cls, count in counts.items():
        texts: dict[str, None] = {}  # a set that keeps its order
        while len(texts) < count:
            texts[_copy(rng) if cls == "copy" else expand(f"{{{cls}}}", rng)] = None
        held = max(1, round(0.05 * count))
        for i, text in enumerate(texts):
            prompts.append(Prompt(prompt=text, cls=cls, split="held" if i < held else "train"))
    rng.shuffle(prompts)
    return prompts + [Prompt(prompt=text, cls=cls, split="unseen") for cls, text in UNSEEN]
