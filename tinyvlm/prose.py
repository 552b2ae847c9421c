"""Plain English the tokenizer is trained on and the model reads a little of."""

from __future__ import annotations

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

WORDS: tuple[str, ...] = tuple(
    """
    able about across act add again age ago air all almost alone along already also always among amount angle animal
    answer area arm around arrive art ask away baby back bad ball bank base bear beat beautiful become bed before
    begin behind believe bell best better big bird bit board boat body bone book born both bottle box boy branch
    bread break bridge bright bring brother brown build burn busy buy cake call camp card care carry case cat catch
    cause centre certain chair chance chart choose city class clean clear climb cloth cloud coast coat cold come
    common complete cook cool copy cost cotton cover crowd cry cup cut dance dark daughter deal dear decide deep
    desert difficult dinner direct dish distance doctor double doubt dress drink drive drop dry during dust each ear
    early earth east easy eat edge egg eight either else empty engine enough enter equal even ever exact example eye
    face fact fail fair fall family famous farm fast father fear feed feel few fight fill find fine finger finish
    fire fish five flat floor flow flower fly food foot force foreign forest forget form forward four free fresh
    friend fruit full game garden gate gather general gentle gift girl give glass goat gold good great group grow
    guess hair half hand happy hard hat hate head hear heart heat heavy help hen here high hill hold hope horse hot
    hundred hunt hurry hurt ice idea important inside iron island job join judge juice keep key kill kind king
    kitchen knee knife knock know lady land language last late laugh law lead leaf learn leave leg lend length less
    level lie life lift like limit lip list listen live load local lock lonely lose lot love lower luck machine main
    make man map mark market marry matter meal mean measure meat medicine meet member middle milk mind miss mix
    money moon more most mother mountain mouth move music must nation nature near neck need needle neighbour net new
    nice night nine noise none north nose note nurse object ocean offer office often oil old only orange order other
    out outside over own pain paint pair paper parent park part party pass past pay peace pen pencil perfect period
    person piece pink place plane plant plate play please plenty point poison police poor position possible potato
    pour power present press pretty price prince prison private probable problem produce promise public pull purple
    push put queen quick quiet radio rain reach ready real reason receive record remember remove rent repair repeat
    reply report rest rice rich ride ring rise road rock roof root rope rose round rule ruler run rush sad safe sail
    salt same sand save school science scissors search season seat second secret seed seem sell send sentence serve
    set seven shade shadow shake share sharp sheep sheet shelf shine ship shirt shoe shoot shop shoulder shout sick
    silence silly silver similar simple single sister sit six size skill skin skirt sleep slip slow smart smell
    smile smoke snow soap sock soft some son soon sort sound soup south space speak special speed spell spend spoon
    sport spread spring stamp star start station stay steal steam still stomach stone store storm story strange
    street strong student study stupid subject such sudden sugar suggest summer sun surprise sweet swim sword system
    take talk taste taxi tea teach team tear telephone television tell ten tennis terrible than thank that then
    thing think third thousand thread three through thunder ticket tie tiger time tin tire title toe together
    tomorrow tonight too tool tooth total touch town train tram travel trip trouble true trust try turn twice two
    type ugly uncle under understand unit until use useful usual vegetable very village visit voice wait wake walk
    want warm wash waste water way weak wear weather wedding week weight welcome west wet wheel white why wide wife
    wild will win wind wine winter wire wise wish with without woman wonder wood work world worry worst write wrong
    year yes yesterday yet young zero zoo
    """.split()
)


def corpus() -> list[str]:
    """Lines to train the tokenizer on, plain prose only; deterministic."""
    return [*(3 * PROSE), *(f"the {word} is {word}" for word in WORDS)]
