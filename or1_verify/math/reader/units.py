"""The meaning of words in a final answer: units and their sizes, number words, and words that make it no answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from fractions import Fraction

_TABLE = """
length 1 m meter metre metro mètre 米 м; 1/1000 mm millimeter millimetre 毫米; 1/10 dm decimeter
length 1/100 cm centimeter centimetre zentimeter centímetro centimètre 厘米 см
length 1000 km kilometer kilometre kilómetro kilomètre 千米 公里 км
length 0.0254 inch inches in; 0.3048 ft foot feet; 0.9144 yd yard; 1609.344 mi mile
time 1 s sec second segundo sekunden seconde 秒; 60 min minute minuto minuten 分钟
time 3600 h hr hour hora stunden heure 小时 時間; 86400 day día tage jour 天 日
time 604800 week semana wochen semaine 周
mass 1 g gram gramo gramm gramme 克; 1000 kg kilogram 千克 公斤; 1/1000 mg milligram; 1000000 ton tonne 吨
volume 1 l L liter litre litro 升; 1/1000 ml mL milliliter
dollar 1 dollar usd dólar dólares 美元; 1/100 cent
angle 1 degree deg grado grad degré 度; 1/60 arcminute; 1/3600 arcsecond
yuan 1 yuan rmb 人民币 元 円; 1/10 jiao; 1/100 fen
euro 1 € euro eur
pound 1 £ pound
length^1/time^-1 1397/3125 mph; 5/18 kph kmh kmph
any 1 unit
force 1 n newton; 1000 kn kilonewton
energy 1 j joule; 1000 kj kilojoule
power 1 w watt; 1000 kw kilowatt
voltage 1 v volt
frequency 1 hz hertz; 1000 khz kilohertz
amount 1 mol mole
gallon 1 gal gallon
year 1 yr year año jahre 年 岁 歳
"""
_IN_TEXT_ONLY = frozenset({"force", "energy", "power", "voltage", "frequency", "amount", "gallon", "year"})
"""Dimensions whose units are read in text only: ``\\text{N}``, but not a bare N."""

UNITS = {
    spelling: (dimension, Fraction(size))
    for dimension, _, units in (line.partition(" ") for line in _TABLE.strip().splitlines())
    for size, *names in map(str.split, units.split(";"))
    for name in names
    for spelling in ((name, f"{name}s") if len(name) > 2 or name in ("hr", "yr") else (name,))
}
"""Word to (dimension, size in the dimension's base unit)."""

SYMBOL_UNITS = {"€": "euro", "£": "pound", "¤": "dollar", "¥": "yuan"}
POWER_WORDS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}

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
MULTIPLIERS: dict[str, int | Fraction] = {"dozen": 12, "hundred": 100, "thousand": 1000, "half": Fraction(1, 2)}
MULTIPLIERS |= {name: 1000**n for n, name in enumerate(("million", "billion", "trillion"), 2)}
MULTIPLIERS |= {word: Fraction(1, n) for n, word in enumerate(ORDINAL_WORDS, 1) if n > 2}
MULTIPLIERS |= {"hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000), "halve": Fraction(1, 2)}
MULTIPLIERS |= {f"{name}s": size for name, size in MULTIPLIERS.items()}
ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")


def _words(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


HEDGES = _words(
    "not no never neither nor none wrong incorrect false undefined unknown except unless maybe perhaps possibly",
    "either if any between least most more less fewer greater above below under over than up from to about around",
    "approx roughly nearly almost approximately times twice half double triple squared cubed percent pct negative",
    "minus plus root true yes other",
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
    "old year franc shilling penny pennies nickel dime bill buck pound calorie byte bit pixel volt ampere",
    "watt kelvin celsius fahrenheit pascal bar barn rad radian steradian turns song movie photo picture painting",
    "poster magazine newspaper email message call visit job task project shift different distinct possible ordered",
    "unordered real exact positive them maneras formas möglichkeiten façons puntos punkte 分 通り です 个 種 种 只 本",
    "人 件 条 枚 次 张 块 颗 棵 头 辆 页 名 位 支 双 個 개 명",
)
"""Words that may stand beside a number and change nothing: what is counted, and how. Others are part of the answer."""

_ABROAD = _words(
    "respuesta antwort réponse resposta risposta ответ 答案 答 答え 正解 정답 답 resultado ergebnis résultat 结果",
    "finale 最终 最后 insgesamt solución lösung 解 la el los las le les das die der es est ist lautet é è 是 为 は 故",
    "因此 所以 したがって 正确 正确的 共 一共 总共 共有 一共有 总共有 选 选项 项 por lo tanto donc also",
)
LEAD_INS = _ABROAD | _words(
    "the a an it its that we there so thus hence therefore and of only day is are equals have get exist exists",
    "answer final value values result solution solutions number option point points set interval range function",
    "equation expression maximum minimum max min sum total ratio probability area volume length width height perimeter",
    "radius distance angle cost price speed age exactly equal equals correct ans then finally conclusion our my this",
)
NAMING = LEAD_INS | NEUTRAL


def change_nothing(words: Iterable[str], known: Set[str] = NEUTRAL) -> bool:
    """Return whether all words beside a value are among the words that change nothing (``known``)."""
    return all({word, word.removesuffix("s")} & known for word in words)


JOINERS = frozenset({"and", "or"})
SPOKEN = (
    dict.fromkeys(_words("und et 和 以及 与 と"), "and")
    | dict.fromkeys(_words("oder ou 或 或者 または"), "or")
    | dict.fromkeys(_words("ja oui sí はい"), "yes")
    | dict.fromkeys(_words("nein non いいえ"), "no")
)
"""Words of other languages for those that a rule knows."""
YES_NO = dict.fromkeys(_words("是 是的 对 对的 正确 正确的"), "Yes") | dict.fromkeys(_words("否 不 不是 错 错误"), "No")
"""What these say when they are a whole answer: 是 is "is" before a value."""
_DENSE = [word for word in {*NAMING, *UNITS, *SPOKEN, *POWER_WORDS} if word > "\u3000"]
WITHOUT_SPACES = re.compile("|".join(sorted(_DENSE, key=len, reverse=True)))
"""The words of these lists in languages that put no space between words."""
QUALIFIERS = frozenset({"where", "for", "with", "only", "here"})

_COMMON = _words(
    "yes no true false pm am even odd none never always prime mon tue wed thu fri sat sun percent square cubic all any",
    "every some real numbers choice per ways way them each",
)
KNOWN_WORDS = frozenset(
    {name.lower() for name, (dimension, _) in UNITS.items() if len(name) > 1 and dimension not in _IN_TEXT_ONLY}
    | set(NUMBER_WORDS)
    | HEDGES
    | (LEAD_INS - _ABROAD)
    | JOINERS
    | QUALIFIERS
    | _COMMON
) - {"a", "an", "in"}
"""A bare run of letters that is one of these is a word, not a product of variables."""
