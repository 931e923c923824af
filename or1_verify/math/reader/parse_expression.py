r"""Parses tokens into an expression tree: the LaTeX of school and competition mathematics, without any guessing.

Conventions where LaTeX leaves a choice: ``x^10`` is a tenth power (typed by hand); ``1/2x`` is ``(1/2)x``;
``\sin 2x \cos x`` is ``\sin(2x) \cos(x)``; ``2\frac13`` and ``2 1/3`` are mixed numbers; other numbers side by side are
unreadable; ``f(x)``, also with g, F or G, is a value of an unknown function, but ``a(x)`` is a product.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from or1_verify.math.reader.brackets import spelling
from or1_verify.math.reader.expression_tree import GREEK, Node, number_node, number_of
from or1_verify.math.reader.normalization import FUNCTIONS, Token, Unreadable

_MAX_DEPTH = 60
_CALLED = re.compile(r"(?:[fgFG]|\\operatorname \{[A-Za-z]+\})[^()]*$")
"""Names that are functions if a bracket follows. ``f(2)`` is then one unknown value, not a product."""
_CLOSERS = {"(": ")", "[": "]", "lfloor": "rfloor", "lceil": "rceil", "\\{": "\\}"}


def parse(items: list[Token]) -> Node:
    """Return the tree of one expression without relations and commas. Raises Unreadable."""
    parser = _Parser(items)
    tree = parser.sum()
    if token := parser.peek():
        raise Unreadable(f"unexpected {token.text!r}")
    return tree


def _has_vector(tree: Node) -> bool:
    return any(node.name.startswith(("\\vec", "\\hat")) for node in tree.walk())


def _cross(left: Node, right: Node) -> Node:
    """Return a cross product with the scalars of both sides before it: ``q v \\times B`` as ``q (v \\times B)``."""
    factors = [_factors(side) for side in (left, right)]
    numbers = [factor for side in factors for factor in side if not _has_vector(factor)]
    vectors = [[factor for factor in side if _has_vector(factor)] for side in factors]
    product = Node("cross", tuple(reduce(lambda a, b: Node("mul", (a, b)), side) for side in vectors))
    return reduce(lambda a, b: Node("mul", (b, a)), reversed(numbers), product)


def _factors(tree: Node) -> list[Node]:
    return [factor for side in tree.args for factor in _factors(side)] if tree.op == "mul" else [tree]


class _Parser:
    def __init__(self, items: list[Token]) -> None:
        self.items = items
        self.at = 0
        self.depth = 0

    def peek(self, ahead: int = 0) -> Token | None:
        return self.items[self.at + ahead] if self.at + ahead < len(self.items) else None

    def is_next(self, *texts: str) -> bool:
        token = self.peek()
        return token is not None and token.kind in ("sign", "command", "escape") and token.text in texts

    def take(self, *texts: str) -> bool:
        if self.is_next(*texts):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"expected {text}")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable("nested too deep")
        tree = self.product(signed=True)
        while token := self.peek():
            if token.kind == "sign" and token.text in "+-":
                self.at += 1
                right = self.product(signed=self.is_next("+", "-"))
                if right.op == "mod" and self.items[self.at - 1].text != ")":
                    raise Unreadable("a sum before mod, which may be all of it or its last term")
                tree = Node("add", (tree, right if token.text == "+" else Node("neg", (right,))))
            elif token.kind == "command" and token.text in ("pm", "mp"):
                self.at += 1
                tree = Node("add", (tree, Node(token.text, (self.product(signed=False),))))
            else:
                break
        self.depth -= 1
        return tree

    def product(self, signed: bool) -> Node:
        if signed and self.take("-"):
            return Node("neg", (self.product(signed=self.is_next("+", "-") and not self.is_next("-")),))
        if signed and self.take("+"):
            return self.product(signed=False)
        if signed and self.is_next("pm", "mp"):
            op = self.items[self.at].text
            self.at += 1
            return Node(op, (self.product(signed=False),))
        tree = self.factor()
        while True:
            if self.take("cdot", "times", "*"):
                between = self.items[self.at - 1].text
                right = self.negatable()
                while between == "times" and _has_vector(tree) and not _has_vector(right) and self.starts_factor():
                    right = self.juxtaposed(right)  # r \times m v
                crossed = between == "times" and _has_vector(tree) and _has_vector(right)
                tree = _cross(tree, right) if crossed else Node("mul", (tree, right))
            elif self.take("bmod", "mod"):
                tree = Node("mod", (tree, self.negatable()))
            elif self.take("/", "div"):
                tree = Node("div", (tree, self.negatable()))
            elif self.starts_factor():
                tree = self.juxtaposed(tree)
            else:
                return tree

    def negatable(self) -> Node:
        return Node("neg", (self.factor(),)) if self.take("-") else self.factor()

    def juxtaposed(self, left: Node) -> Node:
        token = self.peek()
        assert token is not None
        if token.kind == "number":
            if left.op == "num" and left.name.isdigit() and self.fraction_by_slash():
                numerator, denominator = self.items[self.at], self.items[self.at + 2]
                self.at += 3
                return self.mixed(left, number_node(int(numerator.text)), number_node(int(denominator.text)))
            behind = self.items[self.at - 1].text
            if (token.spaced or behind in (")", "!")) and self.items[self.at - 1].kind != "number":
                return Node("mul", (left, self.factor()))
            raise Unreadable("a number right behind something else")
        right = self.factor()
        if left.op == "num" and left.name.isdigit() and right.op == "div" and right.name == "frac":
            top, bottom = right.args
            if top.op == bottom.op == "num" and top.name.isdigit() and bottom.name.isdigit():
                return self.mixed(left, top, bottom)
        return Node("mul", (left, right))

    def fraction_by_slash(self) -> bool:
        ahead = [self.peek(index) for index in range(4)]
        first, slash, last, after = ahead
        if first is None or slash is None or last is None or not first.spaced:
            return False
        ends = after is None or after.text in (",", ")", "%")
        return slash.text == "/" and first.text.isdigit() and last.kind == "number" and last.text.isdigit() and ends

    @staticmethod
    def mixed(whole: Node, top: Node, bottom: Node) -> Node:
        if not 0 < top.number < bottom.number:
            raise Unreadable("a mixed number whose fraction is not a proper one")
        return Node("mixed", (whole, Node("div", (top, bottom), name="frac")))

    def starts_factor(self) -> bool:
        token = self.peek()
        if token is None or token.kind == "word":
            return False
        if token.kind in ("number", "symbol"):
            return True
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and self.opens_bar())
        if token.kind == "escape":
            return token.text == "\\{"
        return token.text in FUNCTIONS | GREEK | {"frac", "sqrt", "pi", "binom", "lfloor", "lceil", "infty", "vec"} | {
            *("overline", "hat", "bar", "angle", "triangle", "mathbb", "operatorname", "sum", "prod")
        }

    def opens_bar(self) -> bool:
        return sum(token.text == "|" and token.kind == "sign" for token in self.items[: self.at]) % 2 == 0

    def factor(self) -> Node:
        start = self.at
        tree = self.primary()
        while token := self.peek():
            if token.kind != "sign":
                break
            if token.text == "^":
                self.at += 1
                tree = self.powered(tree)
            elif token.text == "!":
                self.at += 1
                if tree.op == "factorial":
                    raise Unreadable("a double factorial")
                tree = Node("factorial", (tree,))
            elif token.text == "_":
                self.at += 1
                if tree.op != "sym":
                    raise Unreadable("a subscript behind what is not a symbol")
                tree = replace(tree, name=f"{tree.name}_{self.raw_argument()}")
            elif token.text == "'" and tree.op == "sym":
                self.at += 1
                tree = replace(tree, name=tree.name + "'")
            elif token.text == "(" and (called := _CALLED.match(spelling(self.items[start : self.at]))):
                self.at += 1
                tree = Node("call", (Node("sym", name=called[0]), *self.arguments(")")))
            else:
                break
        return tree

    def arguments(self, closer: str) -> tuple[Node, ...]:
        """Read a function's arguments, separated by commas, and the closing bracket ``closer``."""
        read = [self.sum()]
        while self.take(","):
            read.append(self.sum())
        self.expect(closer)
        return tuple(read)

    def powered(self, base: Node) -> Node:
        if self.take("circ") or self.braced_is("circ"):
            return Node("degree", (base,))
        if base.op == "sym" and (self.take("'") or self.braced_is("'")):
            return replace(base, name=base.name + "'")
        return Node("pow", (base, self.exponent()))

    def braced_is(self, text: str) -> bool:
        inner = [token.text for token in self.items[self.at : self.at + 3]]
        if inner == ["{", text, "}"]:
            self.at += 3
            return True
        return False

    def exponent(self) -> Node:
        if self.take("-"):
            return Node("neg", (self.primary(),))
        return self.primary()

    def argument(self) -> Node:
        r"""Read a macro's argument: an expression in braces, one token, or one digit, as in ``\frac12``."""
        if self.take("{"):
            tree = self.sum()
            self.expect("}")
            return tree
        token = self.peek()
        if token is not None and token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            self.items = [*self.items[: self.at], Token("number", token.text[1:]), *self.items[self.at + 1 :]]
            return number_node(int(token.text[0]))
        return self.primary()

    def raw_argument(self) -> str:
        """Read a subscript, and return its text as a name."""
        if not self.take("{"):
            token = self.peek()
            if token is None:
                raise Unreadable("a subscript is missing")
            self.at += 1
            return token.text
        start, depth = self.at, 1
        while depth:
            token = self.peek()
            if token is None:
                raise Unreadable("braces do not balance")
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            self.at += 1
        return "".join(token.text for token in self.items[start : self.at - 1])

    def primary(self) -> Node:
        token = self.peek()
        if token is None:
            raise Unreadable("something is missing at the end")
        self.at += 1
        if token.kind == "number":
            return Node("num", number=number_of(token.text), name=token.text)
        if token.kind == "symbol":
            return self.symbol(token.text)
        if (token.kind == "sign" and token.text in "([{") or token.text == "\\{":
            return self.group(token.text)
        if token.kind == "sign" and token.text == "|":
            tree = self.sum()
            self.expect("|")
            return Node("abs", (tree,))
        if token.kind == "command":
            return self.command(token.text)
        raise Unreadable(f"unexpected {token.text!r}")

    def symbol(self, letter: str) -> Node:
        counts = letter in ("C", "P", "A") and self.is_next("_", "^") and self.peek(3) is not None
        chosen = self.chosen(letter) if counts else None
        return chosen or Node("sym", name=letter)

    def chosen(self, letter: str) -> Node | None:
        """Read ``C_n^k`` or ``C^k_n`` as combinations, and ``A_n^k`` or ``P_n^k`` as arrangements."""
        start = self.at
        parts = self.scripts(self.argument)
        if len(parts) < 2:
            self.at = start
            return None
        return Node("binom" if letter == "C" else "perm", (parts["_"], parts["^"]))

    def scripts[T](self, read: Callable[[], T]) -> dict[str, T]:
        """Read a subscript (key "_") and a superscript (key "^"), in either order; call ``read`` for each."""
        parts: dict[str, T] = {}
        while (token := self.peek()) and token.text in ("_", "^") and token.text not in parts:
            self.at += 1
            parts[token.text] = read()
        return parts

    def group(self, opener: str) -> Node:
        tree = self.sum()
        if opener == "{":
            for name in ("over", "choose"):
                if self.take(name):
                    right = self.sum()
                    self.expect("}")
                    return Node("div", (tree, right), name="frac") if name == "over" else Node("binom", (tree, right))
            self.expect("}")
            return tree
        self.expect(_CLOSERS[opener])
        return tree if tree.op != "num" else replace(tree, name=tree.name + "()")

    def command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.argument(), self.argument()), name="frac")
        if name == "binom":
            return Node("binom", (self.argument(), self.argument()))
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            tree = self.sum()
            self.expect(_CLOSERS[name])
            return Node("floor" if name == "lfloor" else "ceil", (tree,))
        if name in ("pi", "infty"):
            return Node(name)
        if name in GREEK:
            return Node("sym", name="\\" + name)
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("vec", "overline", "hat", "bar", "operatorname"):
            return Node("sym", name=f"\\{name}({self.raw_argument()})")
        if name in ("angle", "triangle"):
            return self.figure(name)
        if name in ("sum", "prod"):
            return self.series(name)
        raise Unreadable(f"\\{name}")

    def figure(self, name: str) -> Node:
        letters = []
        while (token := self.peek()) and token.kind == "symbol":
            letters.append(token.text)
            self.at += 1
        if name == "angle" and len(letters) == 3:
            letters = min(letters, letters[::-1])  # the angle CBA is ABC
        return Node("sym", name=f"\\{name} {''.join(letters)}")

    def root(self) -> Node:
        index = number_node(2)
        if self.take("["):
            index = self.sum()
            self.expect("]")
        return Node("root", (self.argument(), index))

    def series(self, name: str) -> Node:
        """Read a sum or product, which is compared by its parts and never evaluated."""
        bounds = self.scripts(self.raw_argument)
        limits = Node("sym", name=f"{bounds.get('_', '')}..{bounds.get('^', '')}")
        return Node(name, (limits, self.product(signed=False)))

    def function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        for _ in range(2):
            if name == "log" and self.take("_"):
                base = self.argument()
            elif self.take("^"):
                power = self.exponent()
        tree = self.listed(name) if name in ("max", "min", "gcd", "lcm") else self.applied(name, base)
        if power is None:
            return tree
        if power == Node("neg", (number_node(1),)) and name in ("sin", "cos", "tan"):
            return replace(tree, op="arc" + name)
        return Node("pow", (tree, power))

    def applied(self, name: str, base: Node | None) -> Node:
        if self.is_next("(", "[", "{"):
            start = self.at
            argument = self.primary()
            if self.items[start].text == "{" and self.starts_factor():
                argument = self.extend(argument)
        else:
            argument = Node("neg", (self.extend(self.factor()),)) if self.take("-") else self.extend(self.factor())
        if name == "exp":
            return Node("pow", (Node("sym", name="e"), argument))
        if name == "cbrt":
            return Node("root", (argument, number_node(3)))
        return Node(name, (argument,) if base is None else (argument, base))

    def extend(self, argument: Node) -> Node:
        """Multiply an argument by the factors behind it (2 by x in ``\\sin 2x``), up to a function, bracket or sign."""
        while self.starts_factor() and not self.is_next("(", "[", "|", *FUNCTIONS):
            argument = self.juxtaposed(argument)
        if self.is_next("/") and (following := self.peek(1)) and following.kind == "number":
            self.at += 1
            argument = Node("div", (argument, self.factor()))
        return argument

    def listed(self, name: str) -> Node:
        closers = {"(": ")", "\\{": "\\}", "{": "}"}
        opener = next(filter(self.take, closers), None)
        if opener is None:
            raise Unreadable(f"\\{name} without its list")
        return Node(name, self.arguments(closers[opener]))
