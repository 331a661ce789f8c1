"""A right answer to every coding problem, by the problem's name."""

import inspect
import math
from collections import Counter, deque


def add(a, b):
    return a + b


def is_even(n):
    return n % 2 == 0


def reverse_text(text):
    return text[::-1]


def largest(numbers):
    return max(numbers)


def square(n):
    return n * n


def greet(name):
    return f"Hello, {name}!"


def total(numbers):
    return sum(numbers)


def count_items(items):
    return len(items)


def absolute(n):
    return abs(n)


def shout(text):
    return text.upper() + "!"


def last_item(items):
    return items[-1] if items else None


def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32


def count_vowels(text):
    return sum(letter in "aeiou" for letter in text.lower())


def first_letters(words):
    return [word[0] for word in words]


def larger_of(a, b):
    return a if a > b else b


def repeat_word(word, times):
    return " ".join([word] * times)


def is_palindrome(text):
    letters = [letter for letter in text.lower() if letter.isalnum()]
    return letters == letters[::-1]


def fizz_list(n):
    return ["Fizz" * (k % 3 == 0) + "Buzz" * (k % 5 == 0) or str(k) for k in range(1, n + 1)]


def factorial(n):
    return math.prod(range(1, n + 1))


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def word_counts(text):
    return dict(Counter(text.split()))


def unique_in_order(items):
    return list(dict.fromkeys(items))


def second_largest(numbers):
    values = sorted(set(numbers))
    return values[-2] if len(values) > 1 else None


def flatten(lists):
    return [item for inner in lists for item in inner]


def caesar(text, shift):
    def moved(letter):
        if not (letter.isascii() and letter.isalpha()):
            return letter
        first = ord("a") if letter.islower() else ord("A")
        return chr(first + (ord(letter) - first + shift) % 26)

    return "".join(map(moved, text))


def digit_sum(n):
    return sum(map(int, str(abs(n))))


def merge_sorted(a, b):
    return sorted(a + b)


def are_anagrams(a, b):
    return sorted(a.lower().replace(" ", "")) == sorted(b.lower().replace(" ", ""))


def gcd(a, b):
    return gcd(b, a % b) if b else a


def transpose(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def chunks(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


def fibonacci(n):
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


def title_case(text):
    return " ".join(word.capitalize() for word in text.split(" "))


def group_by_length(words):
    groups = {}
    for word in words:
        groups.setdefault(str(len(word)), []).append(word)
    return groups


def balanced(text):
    closing = {"(": ")", "[": "]", "{": "}"}
    awaited = []
    for letter in text:
        if letter in closing:
            awaited.append(closing[letter])
        elif letter in closing.values() and (not awaited or awaited.pop() != letter):
            return False
    return not awaited


def to_roman(n):
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    signs = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    numeral = ""
    for value, sign in zip(values, signs, strict=True):
        numeral += sign * (n // value)
        n %= value
    return numeral


def run_length(text):
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return "".join(f"{letter}{length}" for letter, length in runs)


def binary_search(numbers, target):
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low if low < len(numbers) and numbers[low] == target else -1


def longest_unique(text):
    longest = start = 0
    last = {}
    for place, letter in enumerate(text):
        start = max(start, last.get(letter, -1) + 1)
        last[letter] = place
        longest = max(longest, place - start + 1)
    return longest


def merge_intervals(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def evaluate_postfix(tokens):
    stack = []
    for token in tokens:
        if token in ("+", "-", "*"):
            right, left = stack.pop(), stack.pop()
            stack.append({"+": left + right, "-": left - right, "*": left * right}[token])
        else:
            stack.append(int(token))
    return stack[0]


def shortest_path(grid):
    goal = (len(grid) - 1, len(grid[0]) - 1)
    steps = {(0, 0): 0}
    queue = deque(steps)
    while queue:
        row, column = queue.popleft()
        for near in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= near[0] <= goal[0] and 0 <= near[1] <= goal[1]
            if inside and near not in steps and grid[near[0]][near[1]] == ".":
                steps[near] = steps[row, column] + 1
                queue.append(near)
    return steps.get(goal, -1)


def change_ways(amount, coins):
    ways = [1] + [0] * amount
    for coin in coins:
        for paid in range(coin, amount + 1):
            ways[paid] += ways[paid - coin]
    return ways[amount]


def spiral(matrix):
    order = []
    rows = [list(row) for row in matrix]
    while rows:
        order += rows.pop(0)
        rows = [list(column) for column in zip(*rows, strict=True)][::-1]
    return order


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
    return row[-1]


def primes_below(n):
    return [k for k in range(2, n) if is_prime(k)]


def solution(name: str) -> str:
    """A program that solves a problem, including the functions above that it calls."""
    functions = "\n\n".join(inspect.getsource(globals()[used]) for used in dict.fromkeys((name, "is_prime")))
    return f"import math\nfrom collections import Counter, deque\n\n{functions}"
