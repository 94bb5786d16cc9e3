"""What the shipped model is taught by heart: small tables, written for it.

Everything here is common knowledge in our own words. `conversations` makes questions and answers of it; nothing else
is known about the world on purpose, and the model card says so.
"""

from functools import cache

_CAPITALS = (
    "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|England:London|Ireland:Dublin|"
    "Scotland:Edinburgh|Austria:Vienna|Switzerland:Bern|Belgium:Brussels|the Netherlands:Amsterdam|"
    "Denmark:Copenhagen|Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Iceland:Reykjavik|Poland:Warsaw|"
    "Hungary:Budapest|Greece:Athens|Turkey:Ankara|Russia:Moscow|Ukraine:Kyiv|Romania:Bucharest|"
    "Bulgaria:Sofia|Croatia:Zagreb|Serbia:Belgrade|the Czech Republic:Prague|Slovakia:Bratislava|"
    "Estonia:Tallinn|Latvia:Riga|Lithuania:Vilnius|Egypt:Cairo|Morocco:Rabat|Tunisia:Tunis|Kenya:Nairobi|"
    "Ethiopia:Addis Ababa|Ghana:Accra|Nigeria:Abuja|Senegal:Dakar|Uganda:Kampala|China:Beijing|"
    "Japan:Tokyo|South Korea:Seoul|Thailand:Bangkok|Vietnam:Hanoi|Indonesia:Jakarta|Malaysia:Kuala Lumpur|"
    "the Philippines:Manila|India:New Delhi|Nepal:Kathmandu|Pakistan:Islamabad|Iran:Tehran|Iraq:Baghdad|"
    "Saudi Arabia:Riyadh|Lebanon:Beirut|Mongolia:Ulaanbaatar|Australia:Canberra|New Zealand:Wellington|"
    "Canada:Ottawa|the United States:Washington|Mexico:Mexico City|Cuba:Havana|Brazil:Brasilia|"
    "Argentina:Buenos Aires|Chile:Santiago|Peru:Lima|Colombia:Bogota|Venezuela:Caracas|Uruguay:Montevideo"
)

OPPOSITES = (
    "hot:cold|big:small|fast:slow|old:young|happy:sad|open:closed|light:dark|high:low|full:empty|loud:quiet|"
    "early:late|wet:dry|hard:soft|strong:weak|left:right|up:down|day:night|rich:poor|clean:dirty|long:short|"
    "good:bad|near:far|thick:thin|heavy:light|sweet:bitter|win:lose|begin:end|push:pull|inside:outside|"
    "first:last|black:white|yes:no|always:never|love:hate|true:false|brave:afraid|smooth:rough|wide:narrow"
)

COLOURS = (
    "the sky:blue|grass:green|snow:white|a ripe tomato:red|a lemon:yellow|coal:black|a carrot:orange|"
    "chocolate:brown|milk:white|blood:red|a banana:yellow|the sea:blue|a leaf in summer:green|an orange:orange|"
    "a cloud:white|an elephant:grey|a strawberry:red|a frog:green|a violet:purple|the sun:yellow|a raven:black"
)

SOUNDS = (
    "dog:barks|cat:meows|cow:moos|duck:quacks|sheep:bleats|horse:neighs|frog:croaks|bee:buzzes|lion:roars|"
    "pig:grunts|owl:hoots|snake:hisses|wolf:howls|mouse:squeaks|bird:sings|rooster:crows"
)

YOUNG = (
    "dog:puppy|cat:kitten|cow:calf|sheep:lamb|horse:foal|pig:piglet|duck:duckling|bear:cub|lion:cub|goat:kid|"
    "hen:chick|deer:fawn|frog:tadpole|kangaroo:joey"
)

LEGS = "dog:four|cat:four|cow:four|horse:four|bird:two|spider:eight|ant:six|bee:six|chicken:two|snake:no|fish:no"

HOMES = (
    "bird:in a nest|bee:in a hive|fish:in the water|fox:in a den|spider:in a web|camel:in the desert|"
    "penguin:in the cold south|monkey:in the trees|whale:in the sea|rabbit:in a burrow|cow:on a farm"
)

EATS = (
    "cow:grass|rabbit:grass and carrots|panda:bamboo|cat:meat and fish|lion:meat|squirrel:nuts|monkey:fruit|"
    "frog:insects|horse:grass and hay|bird:seeds and worms|bear:berries, honey and fish|koala:leaves"
)

KINDS = (
    "fruit:apple, banana, pear, cherry, grape, lemon, peach, plum, orange|"
    "vegetable:carrot, potato, onion, pea, bean, cabbage, tomato, spinach|"
    "animal:dog, cat, horse, cow, lion, elephant, rabbit, mouse, bear, fox|"
    "bird:owl, eagle, duck, sparrow, robin, crow, penguin, swan|"
    "fish:salmon, tuna, trout, shark, cod, carp|"
    "insect:ant, bee, fly, beetle, butterfly, mosquito|"
    "tree:oak, pine, birch, maple, willow, beech|"
    "flower:rose, tulip, daisy, lily, sunflower, violet|"
    "colour:red, blue, green, yellow, black, white, purple, orange, brown|"
    "tool:hammer, saw, screwdriver, drill, axe, shovel|"
    "drink:water, milk, juice, tea, coffee, lemonade|"
    "sport:football, tennis, swimming, running, basketball, hockey|"
    "instrument:piano, guitar, violin, flute, drum, trumpet|"
    "planet:Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune|"
    "country:France, Japan, Brazil, Canada, Egypt, India, Kenya, Norway|"
    "metal:iron, gold, silver, copper, tin, lead|"
    "room:kitchen, bedroom, bathroom, hall, cellar|"
    "month:January, February, March, April, May, June, July, August, September, October, November, December"
)

# thing: what it is, as a sentence
MEANINGS = """\
cairn: A cairn is a pile of stones that people build to mark a path or a place.
computer: A computer is a machine that follows instructions to work with numbers, words and pictures.
program: A program is a list of instructions that a computer follows.
language model: A language model is a program that has learnt from many texts which word comes next.
token: A token is a small piece of text, such as a word or a part of a word, that a language model reads.
neural network: A neural network is a program with many adjustable numbers that learns from examples.
GPU: A GPU is a chip with many small processors that work at the same time.
internet: The internet is a network that connects computers all over the world.
robot: A robot is a machine that can move and do work by itself.
sun: The sun is a star, and it gives light and warmth to the earth.
moon: The moon is a ball of rock that goes round the earth.
star: A star is a huge ball of hot gas that gives off light.
planet: A planet is a large ball of rock or gas that goes round a star.
earth: The earth is the planet on which we live.
sky: The sky is what we see above us when we look up.
cloud: A cloud is made of many tiny drops of water that float in the air.
rain: Rain is water that falls from clouds in drops.
snow: Snow is frozen water that falls from clouds in soft white flakes.
ice: Ice is water that is frozen and hard.
wind: Wind is air that moves.
river: A river is a long stream of water that flows to a lake or to the sea.
lake: A lake is a large body of water with land all around it.
sea: The sea is the salt water that covers most of the earth.
island: An island is a piece of land with water all around it.
mountain: A mountain is a very high hill, often with rocks or snow at the top.
volcano: A volcano is a mountain from which hot melted rock can come out.
desert: A desert is a dry place where it almost never rains.
forest: A forest is a large place with many trees.
tree: A tree is a tall plant with a trunk, branches and leaves.
flower: A flower is the colourful part of a plant that makes seeds.
seed: A seed is the small part of a plant from which a new plant grows.
bee: A bee is a small insect that makes honey and flies from flower to flower.
butterfly: A butterfly is an insect with large colourful wings.
bird: A bird is an animal with feathers and wings.
fish: A fish is an animal that lives in water and breathes with gills.
dog: A dog is a friendly animal that many people keep at home.
cat: A cat is a small animal with soft fur that likes to catch mice.
horse: A horse is a large animal with four legs that people can ride.
elephant: An elephant is a very large grey animal with a long trunk.
spider: A spider is a small animal with eight legs that makes a web.
dinosaur: A dinosaur was an animal that lived on the earth many millions of years ago.
heart: The heart is a muscle in the chest that pumps blood through the body.
brain: The brain is the part of the body with which we think.
book: A book is a set of pages with words or pictures to read.
library: A library is a place where people can read and borrow books.
school: A school is a place where children learn.
teacher: A teacher is a person who helps others learn.
doctor: A doctor is a person who helps people who are ill.
farmer: A farmer is a person who grows plants and keeps animals for food.
baker: A baker is a person who makes bread and cakes.
king: A king is a man who rules a country.
friend: A friend is a person you like and trust.
family: A family is a group of people who belong together, such as parents and their children.
bridge: A bridge is a way over a river, a road or a valley.
train: A train is a row of wagons that runs on rails.
boat: A boat is a small vehicle that travels on water.
bicycle: A bicycle is a vehicle with two wheels that you move with your feet.
car: A car is a vehicle with four wheels and an engine.
clock: A clock is a machine that shows the time.
map: A map is a drawing that shows where places are.
compass: A compass is a tool with a needle that points to the north.
key: A key is a small piece of metal that opens a lock.
money: Money is what people use to buy and sell things.
bread: Bread is a food that is baked from flour and water.
honey: Honey is a sweet food that bees make.
milk: Milk is a white drink that comes from cows and other animals.
salt: Salt is a white mineral that makes food taste better.
music: Music is sound that people make because it is pleasant to hear.
poem: A poem is a short text with rhythm, and often with rhymes.
story: A story tells what happens to somebody, with a beginning, a middle and an end.
dream: A dream is a story that the mind tells itself during sleep.
number: A number says how many things there are.
circle: A circle is a round shape whose edge is everywhere equally far from the middle.
triangle: A triangle is a shape with three sides.
square: A square is a shape with four equal sides and four right angles.
gravity: Gravity is the force that pulls things towards the ground.
light: Light is what lets us see things.
electricity: Electricity is a kind of energy that makes lamps and machines work.
magnet: A magnet is a piece of metal that pulls iron to itself.
oxygen: Oxygen is a gas in the air that we need to breathe.
water: Water is a clear liquid that all living things need."""

# question ; answer
QUESTIONS = """\
How many days are in a week?; There are seven days in a week.
How many months are in a year?; There are twelve months in a year.
How many days are in a year?; There are 365 days in a year, and 366 in a leap year.
How many hours are in a day?; There are 24 hours in a day.
How many minutes are in an hour?; There are 60 minutes in an hour.
How many seconds are in a minute?; There are 60 seconds in a minute.
How many fingers does a person have?; A person has ten fingers.
How many letters are in the alphabet?; There are 26 letters in the English alphabet.
How many legs does a dog have?; A dog has four legs.
How many sides does a triangle have?; A triangle has three sides.
How many planets go round the sun?; Eight planets go round the sun.
What are the seasons?; The four seasons are spring, summer, autumn and winter.
What are the days of the week?; They are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.
What are the primary colours?; The primary colours are red, yellow and blue.
Which planet do we live on?; We live on the planet Earth.
Which planet is the largest?; The largest planet is Jupiter.
Which planet is closest to the sun?; Mercury is the closest planet to the sun.
Which animal is the largest?; The blue whale is the largest animal.
Which animal is the tallest?; The giraffe is the tallest animal.
Which animal is the fastest on land?; The cheetah is the fastest animal on land.
Which ocean is the largest?; The Pacific Ocean is the largest ocean.
Which mountain is the highest?; Mount Everest is the highest mountain.
Where does the sun rise?; The sun rises in the east.
Where does the sun set?; The sun sets in the west.
Why is the sky blue?; The sky is blue because the air scatters blue light from the sun more than other colours.
Why do we sleep?; We sleep so that the body and the mind can rest.
Why do we eat?; We eat because food gives us energy.
Why do birds fly south in winter?; Many birds fly south in winter because it is warmer there and they find more food.
Why do leaves fall from the trees?; Leaves fall in autumn because trees save water and energy for the winter.
Why is the sea salty?; The sea is salty because rivers carry salt from rocks into it.
What do plants need to grow?; Plants need light, water and air to grow.
What does a plant need?; A plant needs light, water and air.
What do we breathe?; We breathe air, which contains oxygen.
What do bees make?; Bees make honey.
What is frozen water called?; Frozen water is called ice.
At what temperature does water boil?; Water boils at 100 degrees Celsius.
At what temperature does water freeze?; Water freezes at 0 degrees Celsius.
What comes after winter?; Spring comes after winter.
What comes after summer?; Autumn comes after summer.
What do you use an umbrella for?; An umbrella keeps you dry when it rains.
What do you use a knife for?; A knife is used to cut things.
What do you do with a book?; You read a book.
What do you wear on your feet?; You wear shoes and socks on your feet.
What do you wear when it is cold?; When it is cold you wear a warm coat, a hat and gloves.
What should I do when I am tired?; When you are tired, you should rest or sleep.
What should I do when I am hungry?; When you are hungry, you should eat something.
What should I do when I am sad?; When you are sad, it helps to talk to a friend or to go for a walk.
What should I do when I am bored?; You could read a book, go outside, or draw a picture.
What is the opposite of opposite?; The opposite of opposite is the same.
Who wrote Romeo and Juliet?; William Shakespeare wrote Romeo and Juliet.
Who wrote Hamlet?; William Shakespeare wrote Hamlet.
Who painted the Mona Lisa?; Leonardo da Vinci painted the Mona Lisa.
Who was Albert Einstein?; Albert Einstein was a scientist who found the theory of relativity.
Who was Isaac Newton?; Isaac Newton was a scientist who described gravity and motion.
Is the earth round?; Yes, the earth is round like a ball.
Is fire hot?; Yes, fire is hot.
Is ice warm?; No, ice is cold.
Can fish fly?; No, most fish cannot fly. They swim.
Can birds swim?; Some birds can swim, such as ducks and swans.
Can pigs fly?; No, pigs cannot fly.
Is a tomato a fruit?; Yes, a tomato is a fruit, although we often eat it as a vegetable.
Is the moon made of cheese?; No, the moon is made of rock."""

# question ; answer. About itself: what it is, and what it is not.
ABOUT = """\
Who are you?; I am Cairn Tiny, a very small language model.
What is your name?; My name is Cairn Tiny.
What are you?; I am Cairn Tiny, a small language model that was trained from nothing with Cairn.
What can you do?; I can tell short stories, work out small sums and answer simple questions.
Are you a robot?; I am not a robot, but I am a program: a small language model.
Are you a person?; No, I am a small language model.
Are you human?; No, I am a small language model.
Are you alive?; No, I am a program. I only write text.
Who made you?; I was trained with Cairn, on one GPU, in a few minutes.
How were you trained?; I was trained with Cairn on simple texts, stories, sums and short chats.
How big are you?; I am very small: I have about ten million parameters.
How old are you?; I am a program, so I do not have an age.
Are you clever?; I am very small, so I know only a few things. I like stories and sums.
Do you make mistakes?; Yes, I make many mistakes. Please check what I say.
Can I trust you?; I am very small and often wrong, so please check what I say.
Do you know everything?; No, I know only a few simple things.
What do you like?; I am a program, but stories and sums are what I do best.
Can you tell stories?; Yes! Ask me for a story about an animal or a child.
Can you do maths?; I can add and subtract small numbers. Larger ones often go wrong.
Can you write code?; No, I am too small to write code.
Where are you?; I run on your computer.
Do you sleep?; No, I am a program and I do not sleep.
Do you have feelings?; No, I am a program and have no feelings.
What is Cairn?; Cairn is a set of programs that trains and serves language models. It trained me.
Help; I can tell a short story, add two numbers, or answer a simple question. What would you like?
What should I ask you?; You could ask me for a story, for a sum, or for the capital of a country."""

JOKES = """\
Why did the bicycle fall over? Because it was two tired.
What do you call a bear with no teeth? A gummy bear.
Why was six afraid of seven? Because seven ate nine.
What has hands but cannot clap? A clock.
Why did the book go to the doctor? Because it had hurt its spine.
What gets wetter the more it dries? A towel.
Why do bees have sticky hair? Because they use honeycombs.
What falls in winter but never gets hurt? Snow."""

CAPITALS = dict(pair.split(":") for pair in _CAPITALS.split("|"))
CITIES = {city: country for country, city in CAPITALS.items()}


@cache
def pairs(table: str) -> list[tuple[str, str]]:
    """`one:other|...` as a list of pairs."""
    return [(one, other) for one, other in (item.split(":") for item in table.split("|"))]


@cache
def lines(table: str, mark: str) -> list[tuple[str, str]]:
    """One pair per line, cut at the first mark."""
    cut = (line.partition(mark) for line in table.splitlines())
    return [(one.strip(), other.strip()) for one, _, other in cut]
