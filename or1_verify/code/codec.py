"""Encodes Python values as plain JSON and back, to pass them between submissions, test programs and our process.

This file imports only the standard library, because the programs inside the sandboxes import it too. Decoding makes
only exact built-in types and LeetCode's ListNode and TreeNode, never an object of the sender's classes.

None, bool, str, list, float and small int are encoded as themselves, other values as objects with one key, the tag:
``tuple``, ``set``, ``frozenset``, ``dict`` (pairs), ``bytes`` (hex), ``int`` (hex of a large int), ``list_node``
(values of a linked list), ``tree_node`` (LeetCode's level order, None for a missing child).
"""

from __future__ import annotations

import itertools
from _collections import deque  # type: ignore[import-not-found]  # collections itself takes time to import
from typing import Any

_ITERABLES: tuple[type, ...] = (range, deque, type({}.keys()), type({}.values()), type({}.items()))
_BIG = 1 << 4096  # above it, decimal conversion is slow (quadratic) and Python may refuse it
_MAX_NODES = 1_000_000


class ListNode:
    """Node of LeetCode's linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """Node of LeetCode's binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def encode(value: Any, iterators: bool = False) -> Any:
    """Return a value encoded. ``iterators``: encode generators, map objects, ranges and the like as lists.

    Raises TypeError for a value that is not data, ValueError for a linked structure or iterator that does not end.
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        number = int(value)
        return number if -_BIG < number < _BIG else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, iterators) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item, iterators)] for key, item in value.items()]}
    for tag, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(item, iterators) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return encode(value.tolist())
    if hasattr(value, "next") and hasattr(value, "val"):
        return {"list_node": [encode(item) for item in walk_list(value)]}
    if hasattr(value, "left") and hasattr(value, "right") and hasattr(value, "val"):
        return {"tree_node": [encode(item) for item in walk_tree(value)]}
    if iterators and (isinstance(value, _ITERABLES) or hasattr(value, "__next__")):
        items = [encode(item, iterators) for item in itertools.islice(value, _MAX_NODES)]
        if len(items) == _MAX_NODES:
            raise ValueError("an iterator of more than " + str(_MAX_NODES - 1) + " items")
        return items
    raise TypeError("a value of type " + type(value).__name__ + " is not data")


def decode(encoded: Any, list_node: Any = ListNode, tree_node: Any = TreeNode) -> Any:
    """Return the value that was encoded, with nodes made by ``list_node`` and ``tree_node``.

    Raises ValueError or TypeError for a value that ``encode`` cannot have made.
    """
    if isinstance(encoded, list):
        return [decode(item, list_node, tree_node) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) != 1:
        raise ValueError("expected one tag")
    ((tag, content),) = encoded.items()
    if tag == "int":
        return int(content, 16)
    if tag == "bytes":
        return bytes.fromhex(content)
    items = decode(content, list_node, tree_node)
    if tag == "dict":
        return dict(items)
    if tag == "list_node":
        return build_list(items, list_node)
    if tag == "tree_node":
        return build_tree(items, tree_node)
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if tag == name:
            return kind(items)
    raise ValueError("unknown tag")


def build_list(values: Any, list_node: Any = ListNode) -> Any:
    head = None
    for value in reversed(list(values)):
        node = list_node(value)
        node.next = head
        head = node
    return head


def build_tree(values: Any, tree_node: Any = TreeNode) -> Any:
    """Return the root of a tree given in LeetCode's level order, which does not list children of missing nodes."""
    pending = iter(list(values))
    first = next(pending, None)
    root = None if first is None else tree_node(first)
    parents = [] if root is None else [root]
    for parent in parents:
        for side in ("left", "right"):
            value = next(pending, None)
            if value is not None:
                child = tree_node(value)
                setattr(parent, side, child)
                parents.append(child)
    return root


def walk_list(node: Any) -> list[Any]:
    values: list[Any] = []
    while node is not None:
        if len(values) == _MAX_NODES:
            raise ValueError("a linked list without an end")
        values.append(node.val)
        node = node.next
    return values


def walk_tree(root: Any) -> list[Any]:
    """Return a tree's values in LeetCode's level order, with None for a missing child, but without None at the end."""
    values: list[Any] = []
    level = [root]
    for node in level:
        if len(values) >= _MAX_NODES:
            raise ValueError("a tree without an end")
        values.append(None if node is None else node.val)
        if node is not None:
            level += [node.left, node.right]
    while values and values[-1] is None:
        values.pop()
    return values


def complaint(error: BaseException) -> str:
    """Return an exception's type and message, in at most 300 characters."""
    try:
        return (type(error).__name__ + ": " + str(error))[:300].removesuffix(": ")
    except Exception:  # raised by its own __str__
        return type(error).__name__
