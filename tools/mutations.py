"""Mutations: small changes of a module's source that its tests should notice.

    comparison   `<` to `<=` and `>=`, `==` to `!=`, `in` to `not in`, `is` to `is not`
    arithmetic   `+` to `-`, `*` to `/`, `**` to `*`, `&` to `|`, a sign removed
    boolean      `and` to `or`, an operand or a `not` removed, a condition negated
    constant     a number plus one, `True` to `False`, another word, an f-string emptied
    return       `return None` in place of a value
    statement    a call, a raise, a continue or an assignment to an attribute removed
    argument     the first two arguments exchanged, `min` for `max`, `any` for `all`

Annotations, decorators, asserts, docstrings and sentences (strings with a space, messages of errors) stay as they are.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OTHER_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = ("min", "max", "isinstance")  # an exchange of arguments changes nothing, or is a TypeError
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases", "type_params", "pattern", "type"}
Change = tuple[str, ast.expr | ast.stmt, str, str]  # function, changed node, kind of change, new text


class Mutant(NamedTuple):
    """One change: where it is, the lines before and after, and the whole source after it."""

    module: str  # path of the file
    function: str  # qualified name; empty at module level
    line: int
    last_line: int
    kind: str
    was: str
    now: str
    source: str


def mutants(source: str, module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    changed = []
    for function, node, kind, text in _changes(ast.parse(source), ""):
        changed.append(_mutant(source, module, function, node, kind, text))
    return sorted((mutant for mutant in changed if mutant.was != mutant.now), key=lambda mutant: mutant.line)


def _mutant(source: str, module: str, function: str, node: ast.expr | ast.stmt, kind: str, text: str) -> Mutant:
    lines = source.encode().splitlines(keepends=True)  # columns are counted in bytes
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    changed = before + text.encode() + after
    whole = b"".join([*lines[:first], changed, *lines[last + 1 :]]).decode()
    was, now = (_one_line(part) for part in (b"".join(lines[first : last + 1]), changed))
    return Mutant(module, function, first + 1, last + 1, kind, was, now, whole)


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _changes(node: ast.AST, function: str) -> Iterator[Change]:
    """The changes of a node and of all below it."""
    if isinstance(node, ast.Assert) or _is_type(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for test in _plain_conditions(node):
        yield function, test, "boolean", f"(not {ast.unparse(test)})"
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((function, node, kind, text) for kind, text in _texts(node))
    for child in _children(node):
        yield from _changes(child, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that may be changed."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from (part for part in node.exc.args if not isinstance(part, ast.JoinedStr))
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        yield node.args[0]
        return
    for name, value in ast.iter_fields(node):
        if name not in SKIPPED_FIELDS:
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _plain_conditions(node: ast.AST) -> list[ast.expr]:
    """Conditions that have no operator of their own, such as `if missing`."""
    tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    return [test for test in tests if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp)]


def _is_type(node: ast.AST) -> bool:
    """Whether a node names a type, such as `Updates = Params | Sequence[Params]`."""
    match node:
        case ast.Assign([ast.Name(name)]):
            return name[0].isupper() and not name.isupper()
        case ast.Subscript(ast.Name("Literal")):
            return True
    return False


def _texts(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """The changes of one node alone: (kind, new text)."""
    match node:
        case ast.Compare(left, ops, comparators):
            for at, op in enumerate(ops):
                for other in OTHER_COMPARISONS[type(op)]:
                    changed = [*ops[:at], other(), *ops[at + 1 :]]
                    yield "comparison", f"({ast.unparse(ast.Compare(left, changed, comparators))})"
        case ast.BinOp(left, op, right) if type(op) in OTHER_OPERATORS:
            yield "arithmetic", f"({ast.unparse(ast.BinOp(left, OTHER_OPERATORS[type(op)](), right))})"
        case ast.AugAssign(target, op, value) if type(op) in OTHER_OPERATORS:
            yield "arithmetic", ast.unparse(ast.AugAssign(target, OTHER_OPERATORS[type(op)](), value))
            yield "statement", "pass"
        case ast.UnaryOp(ast.USub(), operand):
            yield "arithmetic", ast.unparse(operand)
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", f"({ast.unparse(operand)})"
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", f"({ast.unparse(ast.BoolOp(other, values))})"
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                yield "boolean", f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))})"
        case ast.Constant(bool() | int() | float() | str() as value):
            yield from _constants(value)
        case ast.JoinedStr():
            yield "constant", "''"
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield "return", "return None"
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield "statement", "pass"
        case ast.Assign([target]) if _sets_attribute(target):
            yield "statement", "pass"
        case ast.Call(called, [first, second, *others], keywords) if ast.unparse(called) not in SYMMETRIC:
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                yield "argument", ast.unparse(ast.Call(called, [second, first, *others], keywords))
        case ast.Name(name, ast.Load()) if name in OTHER_NAMES:
            yield "argument", OTHER_NAMES[name]


def _constants(value: bool | int | float | str) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int | float):
        yield "constant", repr(value + 1)
    elif " " not in value and "\n" not in value:
        yield "constant", repr(f"other{value}")


def _sets_attribute(target: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute | ast.Subscript) for part in ast.walk(target))
