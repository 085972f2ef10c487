"""Everyday English words, for keys that are drawn and lists that are counted."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
able amber ancient angry autumn awake bitter blue bold brave brief bright broad broken brown busy calm careful cheap
clean clear clever cloudy cold common cool copper crisp cruel curious damp dark deep dense distant dry dull dusty
eager early easy empty equal exact faint fair famous fast fierce fine firm flat foggy foreign formal free fresh frozen
full gentle giant glad golden good grand grave great green grey happy hard harsh heavy hidden high hollow honest huge
humble hungry icy idle jolly keen kind large late lazy lean light little lively local lonely long loose loud lucky mad
mellow mild misty modest muddy narrow neat new noble noisy odd old open orange pale patient plain polite proud purple
quick quiet rapid rare ready red rich rough round royal rusty sad salty scarlet secret shallow sharp shiny short shy
silent silver simple sleepy slow small smooth soft solid sour spare stable steep sticky stiff strange strong sudden
sunny sweet swift tall tame tender thick thin tidy tiny tired tough vast velvet violet vivid warm weak weary wet white
wide wild windy wise wooden yellow young z e a l o u s
""")
NOUNS = _words("""
anchor apple arrow attic badge bakery balcony barrel basket beach bell bench bicycle blanket boat bottle bowl branch
bread bridge broom bucket button cabin camera candle canoe canyon carpet castle cattle cellar chair chalk cherry
circle cliff clock cloud coast coin compass corner cottage cotton cradle crown cupboard curtain dagger desert diamond
dinner door dragon drawer drum engine falcon farm feather fence ferry fiddle field finger flag flame flower flute
forest fountain garden garlic gate glacier glove goose grape guitar hammer harbour harvest hazel helmet hill honey
horizon horse hotel island ivory jacket jewel journal jungle kettle key kitchen kite ladder lake lamp lantern leaf
lemon letter library linen lion lobster market marble meadow melon mirror monkey moon morning mountain museum napkin
needle nest notebook oak ocean office olive onion orchard otter oven owl paddle palace panther paper parcel pasture
path pearl pebble pencil pepper piano picture pigeon pillow pine pipe planet plate pocket poem pond potato prairie
prince pumpkin quarry quilt rabbit radio railway rainbow razor ribbon ring river road robin roof rope rose saddle
sailor salmon sandal satchel school scissors shadow shelf shepherd ship shovel singer sleeve smoke soldier spade
sparrow spoon stable stair station statue stone storm stove straw street sugar table tailor teapot temple theatre
thimble thunder ticket tiger timber tower trail train trumpet tulip tunnel turtle umbrella valley vessel village
violin wagon wallet walnut water whale wheat wheel whistle willow window winter wolf yacht zipper
""")
VERBS = _words("""
accept admire agree allow answer appear arrive attend avoid bake become begin believe belong borrow breathe bring
build bury carry catch celebrate choose climb collect compare connect consider contain cook count create cross dance
decide deliver describe discover divide draw dream drink drive earn enjoy enter escape explain explore fetch finish
float follow forget forgive gather grow guess hear help hope imagine improve include invent invite join jump keep knit
laugh lead learn leave lend listen manage measure mention move notice obey observe offer paint perform plant practise
prepare promise protect publish pull push reach read receive refuse remain remember repair reply rescue return sail
search sell send share shine shout sing sleep smile solve speak spread start stay study suggest swim teach thank think
throw touch travel try understand visit wait walk wander warn wash watch whisper win wish wonder work write yield
""")


def draw_distinct(draw: Callable[[], str], many: int) -> list[str]:
    """Return the first ``many`` different texts that a function gives."""
    found: dict[str, None] = {}
    while len(found) < many:
        found[draw()] = None
    return list(found)


def word_key(rng: random.Random) -> str:
    """Draw an adjective and a noun, as ``quiet-harbour``."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def uuid4(rng: random.Random) -> str:
    """Draw a UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def number(rng: random.Random, digits: int) -> str:
    """Draw a number without leading zeros."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def shuffled_words(rng: random.Random, many: int) -> list[str]:
    """Return different words in random order; where nouns, adjectives and verbs run out, also two nouns in one."""
    words = list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))
    rng.shuffle(words)
    if many > len(words):
        pairs = list(itertools.permutations(NOUNS, 2))
        rng.shuffle(pairs)
        words += dict.fromkeys("".join(pair) for pair in pairs[: 2 * many])
    return words[:many]
