r"""Prompts of our own, from a small grammar: nothing here is third-party text.

Two kinds. *Narrow* prompts all ask for a short Python function over a list, an array or a tuple, so
that a small drafter learns something visible in minutes. *Mixed* prompts take turns between coding,
explaining, rewriting and arithmetic; a drafter of a few million parameters learns little from them
in that time.

The sets in ``samples/`` are the default target's own greedy answers to these prompts, made with
(one command per set, ``NAME`` being one of ``SIZES``)::

    python -m dflash_mp.data.generate data.prompts=NAME target.dtype=float32 \
        max_new_tokens=96 output=dflash_mp/data/samples/NAME.jsonl
"""

import hashlib
from itertools import chain, product
from typing import Any

SIZES = {"narrow_train": 640, "narrow_eval": 160, "mixed_train": 240, "mixed_eval": 60}
"""Names of the prompt sets, and how many prompts each has."""

OPENINGS = (
    "Write a Python function that {}.",
    "In Python, define a function that {}.",
    "Please give me a short Python function that {}.",
    "Write a short Python function that {}.",
    "I need a Python function that {}.",
)

SEQUENCES = (
    "a list of integers",
    "a list of floats",
    "a list of numbers",
    "a given list",
    "an array",
    "a tuple of numbers",
)

SEQUENCE_TASKS = (
    "sorts {}",
    "sorts {} in descending order",
    "reverses {}",
    "doubles every element of {}",
    "squares every element of {}",
    "adds one to every element of {}",
    "multiplies every element of {} by three",
    "removes duplicates from {}",
    "removes the last element from {}",
    "returns the sum of {}",
    "returns the product of {}",
    "returns the average of {}",
    "returns the median of {}",
    "returns the sum of the squares of {}",
    "returns the running totals of {}",
    "returns the first element of {}",
    "returns the last element of {}",
    "returns the first three elements of {}",
    "returns every second element of {}",
    "returns the smallest value in {}",
    "returns the largest value in {}",
    "finds the second largest value in {}",
    "finds the most common value in {}",
    "finds the position of the largest value in {}",
    "finds the difference between the largest and the smallest value in {}",
    "counts the even numbers in {}",
    "counts the odd numbers in {}",
    "counts the zeros in {}",
    "counts how many items are in {}",
    "counts how often a value occurs in {}",
    "filters the positive numbers from {}",
    "filters the negative numbers from {}",
    "filters the even numbers from {}",
    "checks whether a value is in {}",
    "checks whether {} is sorted",
    "checks whether {} is empty",
    "swaps the first and the last element of {}",
)

LANGUAGES = ("JavaScript", "Java", "C", "Rust", "Go", "Ruby")

CODING_TASKS = (
    "Write a {} program that prints the numbers from 1 to 10.",
    "Show me how to declare a constant in {}.",
    "How do I read a line of input in {}?",
    "Write a {} function that adds two numbers.",
    "How do I concatenate two strings in {}?",
    "Show a small example of a loop in {}.",
    "How do I write a comment in {}?",
    "Write a {} function that returns the larger of two numbers.",
    "Show a small example of an if statement in {}.",
    "Write a {} program that greets a user by name.",
    "How do I define a variable in {}?",
    "How do I turn a string into a number in {}?",
    "How do I print the current date in {}?",
)

TOPICS = (
    "photosynthesis",
    "gravity",
    "a rainbow",
    "a database",
    "the water cycle",
    "electricity",
    "a computer virus",
    "the internet",
    "recycling",
    "an eclipse",
    "friction",
    "a battery",
    "inflation",
    "a telescope",
    "the immune system",
    "a compiler",
)

EXPLAINING_TASKS = (
    "Explain {} in simple terms.",
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Describe {} in two sentences.",
    "Why does {} matter?",
)

SENTENCES = (
    "The meeting was moved to Friday because the manager is ill.",
    "We cannot ship your order before next week.",
    "My brother fixed the old bicycle in one afternoon.",
    "The report is late and nobody knows why.",
    "She likes to read novels on the train.",
    "The new printer makes a lot of noise.",
    "Please send me the files before noon.",
    "The cat slept on the warm keyboard all day.",
    "It rained so hard that the picnic was cancelled.",
    "The teacher gave the students an extra day.",
    "Our garden has more tomatoes than we can eat.",
    "The museum closes early on Sundays.",
    "He forgot his keys and had to wait outside.",
    "The bakery on the corner sells good bread.",
    "They painted the kitchen yellow last spring.",
    "The bus was full, so I walked home.",
)

REWRITING_TASKS = (
    'Rewrite this sentence in a formal tone: "{}"',
    'Make this sentence shorter: "{}"',
    'Rewrite this sentence in the future tense: "{}"',
    'Rewrite this sentence as a question: "{}"',
    'Say this in a more cheerful way: "{}"',
)

AMOUNTS = ((17, 5), (24, 6), (36, 9), (48, 12), (55, 11), (63, 7), (72, 8), (81, 3), (90, 15))

ARITHMETIC_TASKS = (
    "What is {0} plus {1}?",
    "What is {0} minus {1}?",
    "What is {0} times {1}?",
    "Divide {0} by {1} and show your steps.",
    "I have {0} apples and give away {1}. How many are left?",
    "A book costs {0} dollars and a pen costs {1} dollars. What do both cost together?",
    "A train travels {0} kilometers per hour for {1} hours. How far does it go?",
    "There are {0} chairs in each of {1} rooms. How many chairs are there?",
    "Is {0} larger than {1} times two? Explain.",
    "Find the average of {0} and {1}.",
)


def prompt_rows(name: str) -> list[dict[str, Any]]:
    """The prompts of one set of ``SIZES`` as rows ``{id, messages, source}``, always the same.

    A kind's training and held-out prompts are cut from one list without repetitions, so they are
    disjoint.
    """
    kind, part = name.split("_")
    texts = _narrow() if kind == "narrow" else _mixed()
    heldout = SIZES[f"{kind}_eval"]
    chosen = texts[:heldout] if part == "eval" else texts[heldout : heldout + SIZES[name]]
    return [
        {
            "id": f"{kind}-{part}:{number}",
            "messages": [{"role": "user", "content": text}],
            "source": name,
        }
        for number, text in enumerate(chosen)
    ]


def _narrow() -> list[str]:
    return _shuffled(_fill(OPENINGS, _fill(SEQUENCE_TASKS, SEQUENCES)))


def _mixed() -> list[str]:
    kinds = (
        _fill(CODING_TASKS, LANGUAGES),
        _fill(EXPLAINING_TASKS, TOPICS),
        _fill(REWRITING_TASKS, SENTENCES),
        [task.format(*pair) for task, pair in product(ARITHMETIC_TASKS, AMOUNTS)],
    )
    # One of each kind in turn; the shortest list ends it.
    turns = zip(*(_shuffled(kind) for kind in kinds), strict=False)
    return list(chain.from_iterable(turns))


def _fill(templates: tuple[str, ...], things: tuple[str, ...] | list[str]) -> list[str]:
    return [template.format(thing) for template, thing in product(templates, things)]


def _shuffled(texts: list[str]) -> list[str]:
    """A fixed order without pattern, the same on every Python version."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
