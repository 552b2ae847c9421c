"""Plain English, on which the tokenizer is trained and the model a little."""

from __future__ import annotations

from importlib.resources import files

PROSE: tuple[str, ...] = (
    "A picture is a grid of small squares, and every square has a colour.",
    "The model looks at the picture first and then it reads the question.",
    "Questions are short. Answers are shorter. The best answer is one word.",
    "A line has two ends, a corner has two lines, and a ring has no end at all.",
    "Red is the colour of a ripe apple; green is the colour of the grass under the tree.",
    "The sky is blue in the morning and orange in the evening.",
    "When the light is low, a bright spot can be seen from far away.",
    "Write down what you see, not what you expect to see.",
    "The left side of the page is where the reading starts.",
    "Above the table hangs a lamp, and below the table sleeps a small dog.",
    "She drew a curve from the top of the sheet to the bottom, then a bar across the middle.",
    "Nobody had seen that alphabet before, yet every sign in it had a name.",
    "He counted the dots twice, because the first count was wrong.",
    "Training changes the weights of a model a little at every step.",
    "A sampler draws the next token; a trainer makes the right token more likely.",
    "The reward is high when the answer is right and zero when it is wrong.",
    "An adapter is a small pair of matrices that sits beside a large frozen one.",
    "How many people are in the room? Which of them is the oldest? Where is the door?",
    "What is the name of this sign? Which sign is this? What does the picture show?",
    "Is this shape open or closed? Is it thick or thin? Is it large or small?",
    "Which digit is this? Which letter is this? Which word is written here?",
    "This is a test. This is not a test. These are the results of the test.",
    "Please describe the image in one sentence and then stop.",
    "You are a helpful assistant that can look at images and answer questions about them.",
    "The quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly.",
    "If there is nothing in the picture, say that there is nothing in the picture.",
    "First turn on the light, then open the window, and after that close the door.",
    "A small change in the input should not make a large change in the output.",
    "There are twelve months in a year, seven days in a week, and sixty minutes in an hour.",
    "The numbers 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9 are written with ten different signs.",
    "It was raining when the train left the station, and it was still raining when it came back.",
    "Every function takes an argument and returns a value: def f(x): return x + 1",
    "for index, token in enumerate(tokens): print(index, token)",
    '{"role": "user", "content": "Hello, world!"}',
    "The file could not be opened because it does not exist; check the path and try again.",
    "My favourite colour is yellow, but the walls of my house are white and its roof is black.",
    "Grey is between black and white, purple is between red and blue.",
    "A square has four equal sides. A triangle has three. A circle has none.",
    "The cross stands in the centre of the field, the other shapes stand in the corners.",
    "Reading a picture is like reading a page: start somewhere, then follow the lines.",
)


def corpus() -> list[str]:
    """Returns the lines on which the tokenizer is trained: the prose, and common words one by one."""
    words = files("fovea_tinyvlm").joinpath("words.txt").read_text(encoding="utf-8").split()
    return [*(3 * PROSE), *(f"the {word} is {word}" for word in words)]
