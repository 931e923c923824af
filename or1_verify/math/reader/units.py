"""The meaning of words in a final answer: units and their sizes, number words, and words that make it no answer."""

from __future__ import annotations

from fractions import Fraction

_Names = dict[str, tuple[str, Fraction | int]]


def _scaled(dimension: str, sizes: _Names) -> dict[str, tuple[str, Fraction]]:
    return {name: (dimension, Fraction(size)) for names, size in sizes.values() for name in names.split()}


_LENGTH: _Names = {
    "m": ("m meter meters metre metres", 1),
    "cm": ("cm centimeter centimeters centimetre centimetres", Fraction(1, 100)),
    "mm": ("mm millimeter millimeters millimetre millimetres", Fraction(1, 1000)),
    "dm": ("dm decimeter decimeters", Fraction(1, 10)),
    "km": ("km kilometer kilometers kilometre kilometres", 1000),
    "in": ("inch inches in", Fraction(254, 10000)),
    "ft": ("ft foot feet", Fraction(3048, 10000)),
    "yd": ("yd yard yards", Fraction(9144, 10000)),
    "mi": ("mile miles mi", Fraction(1609344, 1000)),
}
_TIME: _Names = {
    "s": ("s sec secs second seconds", 1),
    "min": ("min mins minute minutes", 60),
    "h": ("h hr hrs hour hours", 3600),
    "day": ("day days", 86400),
    "week": ("week weeks", 604800),
}
_MASS: _Names = {
    "g": ("g gram grams", 1),
    "kg": ("kg kilogram kilograms", 1000),
    "mg": ("mg milligram milligrams", Fraction(1, 1000)),
    "t": ("ton tons tonne tonnes", 1_000_000),
}
_VOLUME: _Names = {"l": ("l L liter liters litre litres", 1), "ml": ("ml mL milliliter milliliters", Fraction(1, 1000))}
_MONEY: _Names = {"$": ("dollar dollars usd", 1), "c": ("cent cents", Fraction(1, 100))}
_ANGLE: _Names = {
    "deg": ("degree degrees deg", 1),
    "arcmin": ("arcminute arcminutes", Fraction(1, 60)),
    "arcsec": ("arcsecond arcseconds", Fraction(1, 3600)),
}
_SPEED: _Names = {
    "mph": ("mph", Fraction(1609344, 1000) / 3600),
    "km/h": ("kph kmh kmph", Fraction(1000, 3600)),
}
_YUAN: _Names = {"yuan": ("yuan rmb", 1), "jiao": ("jiao", Fraction(1, 10)), "fen": ("fen", Fraction(1, 100))}

_OTHERS: dict[str, _Names] = {
    "force": {"N": ("n newton newtons", 1), "kN": ("kn kilonewton kilonewtons", 1000)},
    "energy": {"J": ("j joule joules", 1), "kJ": ("kj kilojoule kilojoules", 1000)},
    "power": {"W": ("w watt watts", 1), "kW": ("kw kilowatt kilowatts", 1000)},
    "voltage": {"V": ("v volt volts", 1)},
    "frequency": {"Hz": ("hz hertz", 1), "kHz": ("khz kilohertz", 1000)},
    "amount": {"mol": ("mol mols mole moles", 1)},
    "gallon": {"gal": ("gal gals gallon gallons", 1)},
    "year": {"yr": ("yr yrs year years", 1)},
}
"""Units that are read in text only: ``\\text{N}``, but not a bare N."""

UNITS: dict[str, tuple[str, Fraction]] = {
    **_scaled("length", _LENGTH),
    **_scaled("time", _TIME),
    **_scaled("mass", _MASS),
    **_scaled("volume", _VOLUME),
    **_scaled("dollar", _MONEY),
    **_scaled("angle", _ANGLE),
    **_scaled("yuan", _YUAN),
    **_scaled("euro", {"€": ("€ euro euros eur", 1)}),
    **_scaled("pound", {"£": ("£ pounds", 1)}),
    **_scaled("length^1/time^-1", _SPEED),
    **{name: unit for dimension, names in _OTHERS.items() for name, unit in _scaled(dimension, names).items()},
    **_scaled("any", {"unit": ("unit units", 1)}),
}
"""Word to (dimension, size in the dimension's base unit)."""

SYMBOL_UNITS = {"€": "euro", "£": "pound", "¤": "dollar", "¥": "yuan"}
MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1000} | {
    name: 1000**n for n, name in enumerate(("million", "billion", "trillion"), 2)
}
MULTIPLIERS |= {f"{name}s": size for name, size in MULTIPLIERS.items()}
POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(_SMALL.split())}
NUMBER_WORDS |= {word: 10 * n for n, word in enumerate(_TENS.split(), 2)}
ORDINAL_WORDS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"),
    *("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"),
    "twentieth",
)
ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")


def _words(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


HEDGES = _words(
    "not no never neither nor wrong incorrect false none undefined except unless",  # denials
    "between least most more less fewer greater above below under over than up from to",  # bounds
    "about around approximately approx roughly nearly almost unknown maybe perhaps possibly either if any other",
    "times twice half double triple squared cubed factorial percent pct percents",  # another value
    "negative minus plus root power infinite infinitely",
    "true yes",
    *NUMBER_WORDS,
    *MULTIPLIERS,
)
"""Words that change the meaning of a number beside them. With one of them, nothing is read as a number."""

NEUTRAL = _words(
    "in total altogether all overall exactly each per of the a an way kind type set group people person student",
    "child children boy girl man men woman women teacher player friend member team class family worker guest",
    "voter passenger dancer singer soldier sailor runner driver customer employee adult kid candidate ball marble",
    "coin card book page word letter digit number integer item thing piece part unit object box bag pack bottle",
    "cup glass can jar bucket basket tray shelf shelves room house floor stair seat table chair desk door window",
    "car bus buse train truck bike bicycle boat ship plane ticket trip lap mile step game match matche point goal",
    "apple orange banana pear peach peache plum lemon mango grape cherry cherries berry berries strawberry",
    "strawberries cookie cake pie pizza slice sandwich sandwiche egg candy candies chocolate muffin cupcake donut",
    "loaf loaves bread potato potatoe tomato tomatoe carrot flower rose tulip tree plant seed leaf leaves animal",
    "dog cat cow horse sheep pig chicken duck bird fish fishe frog rabbit bunny bunnies ant bee spider snake",
    "turtle lion tiger bear elephant monkey mouse mice pen pencil crayon marker eraser notebook paper sheet",
    "sticker stamp toy doll block brick tile puzzle shirt shoe sock hat dress dresse pant jacket button bead",
    "ribbon bracelet necklace ring jewel stone rock shell question problem answer solution roots values term",
    "element subset triple pair tuple quadruple sequence permutation combination arrangement function polynomial",
    "matrix matrice vector path route line segment edge vertex vertices vertice face side angle triangle squares",
    "rectangle circle polygon diagonal region intersection primes factors divisors multiples zeros case",
    "possibility possibilities outcome choice option color colour month decade century centuries yen rupee peso",
    "franc shilling penny pennies nickel dime bill buck pound percentage calorie byte bit pixel volt watt ampere",
    "kelvin celsius fahrenheit pascal bar barn rad radian steradian turns song movie photo picture painting",
    "poster magazine newspaper email message call visit job task project shift",
)
"""Words that may stand beside a number and change nothing: what is counted, and how. Others are part of the answer."""

LEAD_INS = _words(
    "the a an it its that we there so thus hence therefore and of only day is are equals have get exist exists",
    "answer final value values result solution solutions number option point points set interval range function",
    "equation expression maximum minimum max min sum total ratio probability area volume length width height perimeter",
    "radius distance angle cost price speed age exactly equal equals",
)
JOINERS = frozenset({"and", "or"})
QUALIFIERS = frozenset({"where", "for", "with", "only", "here"})

_COMMON = "yes no true false pm am even odd none never always prime mon tue wed thu fri sat sun"
KNOWN_WORDS = frozenset(
    {name.lower() for name, (dimension, _) in UNITS.items() if len(name) > 1 and dimension not in _OTHERS}
    | set(NUMBER_WORDS)
    | HEDGES
    | LEAD_INS
    | JOINERS
    | QUALIFIERS
    | set(_COMMON.split())
    | {"percent", "square", "cubic", "all", "real", "numbers", "choice", "per", "ways", "way"}
) - {"a", "an", "in"}
"""A bare run of letters that is one of these is a word, not a product of variables."""
