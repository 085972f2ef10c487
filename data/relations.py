"""Facts about people, with the question of each: for generated passages and for facts hidden in documents."""

from __future__ import annotations

from typing import NamedTuple


class Relation(NamedTuple):
    """A kind of fact: its sentence, its question, and its possible answers."""

    fact: str
    question: str
    answers: tuple[str, ...]


def _numbers(digits: int) -> tuple[str, ...]:
    """Return 499 evenly spread numbers with this many digits."""
    return tuple(str(10 ** (digits - 1) + n * (9 * 10 ** (digits - 1)) // 499) for n in range(499))


# fmt: off
NAMES = {
    "train": (
        "Abel", "Agnes", "Alma", "Anton", "Basil", "Bella", "Boris", "Clara", "Conrad", "Dora",
        "Edgar", "Elsa", "Emil", "Esther", "Felix", "Flora", "Fritz", "Gerda", "Greta", "Gustav",
        "Hector", "Heidi", "Hugo", "Ida", "Igor", "Irma", "Ivan", "Joan", "Jonas", "Judith", "Karl",
        "Kira", "Lars", "Lena", "Leo", "Lydia", "Magnus", "Mara", "Milo", "Nadia", "Nils", "Nora",
        "Olga", "Oscar", "Paula", "Petra", "Rolf", "Rosa",
    ),
    "validation": (
        "Ada", "Axel", "Bruno", "Cleo", "Dirk", "Edith", "Finn", "Gloria", "Harald", "Ingrid",
        "Julius", "Klara", "Ludwig", "Marta", "Otto", "Pia", "Quentin", "Ruth", "Stefan", "Thea",
        "Ulla", "Viktor", "Wanda", "Yvonne",
    ),
}
TRADES = (
    "pilot", "tailor", "dentist", "plumber", "potter", "farmer", "chemist", "painter", "surgeon",
    "printer", "jeweller", "carpenter", "editor", "geologist", "translator", "beekeeper",
)
RELATIONS = (
    Relation(
        "{who} plays the {what} on Sundays.", "Which instrument does {who} play?",
        ("cello", "trumpet", "violin", "flute", "piano", "guitar", "drum", "harp", "banjo", "clarinet"),
    ),
    Relation(
        "{who} painted the front door {what}.", "Which colour did {who} choose for the front door?",
        ("red", "green", "blue", "yellow", "white", "black", "orange", "purple", "brown", "pink"),
    ),
    Relation(
        "{who} always asks for {what}.", "What does {who} always ask for?",
        ("coffee", "tea", "milk", "cocoa", "cider", "lemonade", "juice", "soup", "honey", "cheese"),
    ),
    Relation(
        "{who} takes care of a {what}.", "Which animal does {who} take care of?",
        ("horse", "parrot", "rabbit", "turtle", "goat", "donkey", "hamster", "pigeon", "lizard", "sheep"),
    ),
    Relation(
        "{who} has a ticket to {what}.", "To which city does {who} have a ticket?",
        ("Paris", "Rome", "Vienna", "Lisbon", "Madrid", "Berlin", "Prague", "Dublin", "Athens", "Oslo"),
    ),
    Relation(
        "{who} planted a bed of {what} this spring.", "Which flowers did {who} plant?",
        ("roses", "tulips", "lilies", "daisies", "violets", "poppies", "orchids", "asters", "peonies", "irises"),
    ),
    Relation("{who} rents locker {what}.", "Which locker does {who} rent?", tuple(map(str, range(11, 100)))),
)
#: Facts whose answers are numbers, which no model can guess; they are put into documents.
NUMBERS = (
    Relation("{who} paid {what} crowns for the boat.", "How many crowns did {who} pay for the boat?", _numbers(4)),
    Relation("To reach {who}, dial {what}.", "What does one dial to reach {who}?", _numbers(6)),
    Relation("{who} wrote {what} letters over the years.", "How many letters did {who} write?", _numbers(3)),
    Relation("The parcel for {who} is marked {what}.", "What is marked on the parcel for {who}?", _numbers(7)),
    Relation("{who} sailed {what} miles in the end.", "How many miles did {who} sail?", _numbers(5)),
)
# fmt: on
