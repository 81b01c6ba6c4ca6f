"""Small mistakes that a program may contain: every mutant of a source file, each with a name that survives editing.

A mutant is the file with one expression or statement changed. Only what functions compute and constants in capitals are
changed. Annotations, decorators, error messages and a class's fields (hyper-parameters, whose defaults are choices and
not mathematics) stay as they are.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_PAIRS = (
    *(("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("clamp_min", "clamp_max"), ("any", "all")),
    *(("zeros_like", "ones_like"), ("zeros", "ones"), ("new_zeros", "new_ones"), ("sum", "mean"), ("add", "sub")),
    *(("isfinite", "isnan"), ("triu", "tril"), ("log_softmax", "softmax"), ("exp", "log"), ("sqrt", "square")),
)
NAMES = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
# Without them nothing changes on the CPU (device) or for arguments that agree (strict).
KEPT_KEYWORDS = {"device", "strict"}
# Arguments that everybody would notice at once in another place, names that are no values, and calls that have none.
NO_VALUES = {"task", "self", "self.optimizer", "torch.zeros_like"}
NAMESPACES = {"torch", "tree", "math", "F", "client_rows", "self", "task"}
WITHOUT_VALUE = {"range", "len", "isinstance", "partial", "zip", "enumerate"}
Change = tuple[str, ast.AST, str]  # kind, what is replaced, by what


class Mutant(NamedTuple):
    """One change of one file."""

    file: str  # its path inside the package
    function: str  # the function or method that contains it; "" outside of all
    kind: str  # the mistake, in a word
    change: str  # "old -> new" without regard to layout; "#2" is appended to the second of its name in a function, ...
    start: int  # in bytes
    end: int
    text: str  # what stands there instead

    @property
    def name(self) -> str:
        return f"{self.file} {self.function}: {self.change}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, which differ from it and from each other."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    original = ast.parse(source)
    seen, names, found = set(), Counter[tuple[str, str]](), []
    for function, (kind, node, new) in _changes(original):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        text = new if isinstance(node, ast.stmt) or re.fullmatch(r"[\w.]+", new) else f"({new})"
        if (start, end, text) in seen or new == ast.unparse(node):
            continue
        seen.add((start, end, text))
        name = f"{ast.unparse(node)} -> {new}"
        names[function, name] += 1
        times = names[function, name]
        found.append(
            Mutant(file, function, kind, name if times == 1 else f"{name} #{times}", start, end, text),
        )
    return found


def _changes(module: ast.Module) -> Iterator[tuple[str, Change]]:
    """Yield the changes of a module, each with the name of the function that contains it."""
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef):
            yield from ((statement.name, change) for change in _of_function(statement))
        elif isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from ((f"{statement.name}.{inner.name}", change) for change in _of_function(inner))
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id.isupper():
                yield from (("", change) for change in _of_expression(statement.value))


def _of_function(function: ast.FunctionDef) -> Iterator[Change]:
    for default in [*function.args.defaults, *(d for d in function.args.kw_defaults if d is not None)]:
        yield from _of_expression(default)
    for statement in function.body:
        yield from _of_statement(statement)


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.FunctionDef):
        yield from _of_function(node)
        return
    if isinstance(node, ast.If | ast.While):
        yield "condition", node.test, f"not ({ast.unparse(node.test)})"
    if isinstance(node, ast.If):
        yield "condition", node.test, "True"
        yield "condition", node.test, "False"
    if isinstance(node, ast.AugAssign):
        yield "statement", node, "pass"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        old = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        new = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
        if new and set(new) <= old:
            yield "statement", node, "pass"  # an update of what was there before
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _of_statement(child)
        elif isinstance(child, ast.expr):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                yield from _of_expression(child)
        elif isinstance(child, ast.match_case | ast.withitem | ast.ExceptHandler):
            for inner in ast.iter_child_nodes(child):
                if isinstance(inner, ast.stmt):
                    yield from _of_statement(inner)
                elif isinstance(inner, ast.expr):
                    yield from _of_expression(inner)


def _of_expression(node: ast.expr) -> Iterator[Change]:
    """Yield the changes of an expression and of those inside it."""
    if isinstance(node, ast.JoinedStr):
        return  # words
    for kind, new in _replacements(node):
        yield kind, node, new
    skipped = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg in KEPT_KEYWORDS}
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            skipped |= {id(each) for each in ast.walk(child)}  # words; `walk` comes to them later
        if isinstance(child, ast.expr) and child is not node and id(child) not in skipped:
            for kind, new in _replacements(child):
                yield kind, child, new


def _replacements(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield (kind, new text) for the expression itself."""
    text = ast.unparse
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            kind = type(value)
            yield "constant", repr(kind(1 - value if value in (0, 1) else 2 * value))
            if value == 1:
                yield "constant", repr(kind(2))
        case ast.BinOp(left, operator, right):
            if _is_words(left) or _is_words(right):
                return
            if type(operator) in ARITHMETIC:
                yield "arithmetic", text(ast.BinOp(left, ARITHMETIC[type(operator)](), right))
            if isinstance(operator, ast.MatMult | ast.Sub | ast.Div | ast.Pow):
                yield "swap", text(ast.BinOp(right, operator, left))
            yield "term", text(left)
            yield "term", text(right)
        case ast.UnaryOp(_, operand) if not isinstance(operand, ast.Constant):
            yield "sign", text(operand)
        case ast.UnaryOp(ast.USub(), operand):
            yield "sign", text(operand)
        case ast.Compare(left, [operator], [right]):
            for other in COMPARISONS[type(operator)]:
                yield "comparison", text(ast.Compare(left, [other()], [right]))
        case ast.BoolOp(operator, values):
            other_way = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "condition", text(ast.BoolOp(other_way, values))
            for i in range(len(values)):
                kept = values[:i] + values[i + 1 :]
                yield "term", text(kept[0] if len(kept) == 1 else ast.BoolOp(operator, kept))
        case ast.IfExp(test, body, orelse):
            yield "condition", text(ast.IfExp(test, orelse, body))
            yield "condition", text(body)
            yield "condition", text(orelse)
        case ast.Dict(keys, values):
            for i in range(len(keys)):
                yield "element", text(ast.Dict(keys[:i] + keys[i + 1 :], values[:i] + values[i + 1 :]))
        case ast.Call():
            yield from _call_replacements(node)


def _call_replacements(call: ast.Call) -> Iterator[tuple[str, str]]:
    text = ast.unparse
    function, args, keywords = call.func, call.args, call.keywords
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    if name in NAMES:
        if isinstance(function, ast.Attribute):
            other: ast.expr = ast.Attribute(function.value, NAMES[name], ast.Load())
        else:
            other = ast.Name(NAMES[name], ast.Load())
        yield "function", text(ast.Call(other, args, keywords))
    for i, keyword in enumerate(keywords):
        if keyword.arg not in KEPT_KEYWORDS:
            yield "keyword", text(ast.Call(function, args, keywords[:i] + keywords[i + 1 :]))
    values = [arg for arg in args if not isinstance(arg, ast.Starred | ast.Lambda) and text(arg) not in NO_VALUES]
    for one, other_one in pairwise(values):
        exchanged = {id(one): other_one, id(other_one): one}
        yield "swap", text(ast.Call(function, [exchanged.get(id(arg), arg) for arg in args], keywords))
    of_a_value = isinstance(function, ast.Attribute) and not (
        isinstance(function.value, ast.Name) and function.value.id in NAMESPACES
    )
    if of_a_value and isinstance(function, ast.Attribute):
        yield "call", text(function.value)  # x.clamp_min(0) -> x
    elif values and name not in WITHOUT_VALUE:
        yield "call", text(values[0])  # f(x, y) -> x
    if name in ("where", "mix", "put") and len(args) == 3:
        yield "call", text(args[1])
        yield "call", text(args[2])


def _is_words(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
