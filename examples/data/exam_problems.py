"""The example's evaluation set: what the training set must not hold."""

# ruff: noqa: E501  # a statement is one line

from __future__ import annotations

from math_problems import MathProblem

EXAM = tuple(
    MathProblem(statement, answer, f"One finds $\\boxed{{{answer}}}$.")
    for statement, answer in (
        ("A bag holds tokens marked with the primes below 20. Two tokens are taken at once. In how many ways is the product of their marks even?", "7"),
        ("Point $P$ lies on side $AB$ of square $ABCD$ with side length 12 such that $AP = 5$. Find $CP^2 + DP^2$.", "362"),
        ("A sequence begins with 3 and every later term is one more than the double of the term before it. Find its ninth term.", "1023"),
        ("How many three-digit numbers have digits that strictly decrease from left to right?", "120"),
        ("Seven friends sit round a circular table; Ada and Bo refuse to be neighbours. Counting seatings that differ by a rotation as one, how many are there?", "480"),
        ("The polynomial $x^3 - 6x^2 + kx - 6$ has the roots 1, 2 and 3. Find $k$.", "11"),
        ("For what positive integer $n$ is $1 + 2 + \\dots + n$ equal to 1275?", "50"),
        ("A cube of edge 4 is painted and then sawn into unit cubes. How many of these have paint on exactly two faces?", "24"),
        ("The digits of a two-digit number add up to 11, and swapping them makes it larger by 27. What is the number?", "47"),
        ("Find the number of subsets of $\\{1, 2, \\dots, 9\\}$ that hold no two consecutive integers.", "89"),
        ("Two of the altitudes of a triangle of area 60 measure 8 and 10. Find the sum of the two sides on which they stand.", "27"),
        ("A palindrome of five digits is picked at random. The probability that it is a multiple of 5 is $m/n$ in lowest terms. Find $m + n$.", "10"),
    )
)  # fmt: skip
