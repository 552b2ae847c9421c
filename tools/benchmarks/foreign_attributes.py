"""Finds attributes that another object sets after construction, by reading the source."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Class:
    """Facts from the source about a class."""

    is_record: bool
    """True for a dataclass or a class without methods: a record that its holder may change."""
    bases: list[str]
    attributes: set[str] = field(default_factory=set)
    """Attributes set on `self` in its methods or declared in its body."""
    types: dict[str, str] = field(default_factory=dict)
    """Class of an attribute, if the source states it."""
    methods: set[str] = field(default_factory=set)


Classes = Mapping[str, list[_Class]]
"""Classes, keyed by their names; several processes may have classes with the same name."""


def foreign_attributes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Returns assignments to another object's attribute outside its own methods, as `path:line: target`.

    Not counted are assignments to
      * an object of an external class: a protobuf message, a tensor, a component of vLLM;
      * an object in the function that creates it (`other = Replica(...)`);
      * a record (a dataclass, or a class without methods), unless the value is a method, which makes it a hook.

    The class of the object is looked up in annotations and constructor calls. If the source does not state it, the
    assignment counts unless a class with an attribute of that name is a record.
    """
    read = {
        node: _read_class(node)
        for tree in trees.values()
        for node in _nested_statements(tree)
        if isinstance(node, ast.ClassDef)
    }
    classes: defaultdict[str, list[_Class]] = defaultdict(list)
    for node, found in read.items():
        classes[node.name].append(found)
    return [
        f"{path}:{target.lineno}: {ast.unparse(target)}"
        for path, tree in sorted(trees.items())
        for owner, function in _functions(tree)
        for target, value in _assignments(function)
        if _is_foreign(target, value, function, read[owner] if owner else None, classes)
    ]


def _is_foreign(
    target: ast.Attribute, value: ast.expr | None, function: Function, owner: _Class | None, classes: Classes
) -> bool:
    base = target.value
    if isinstance(base, ast.Name) and (base.id in ("self", "cls") or base.id in _made_here(function)):
        return False
    kind = _class_name(base, function, owner)
    named = classes.get(kind, []) if kind else [one for same in classes.values() for one in same]
    candidates = [one for one in named if target.attr in _attributes(one, classes)]
    is_hook = owner is not None and isinstance(value, ast.Attribute) and value.attr in owner.methods
    return bool(candidates) and (is_hook or not any(one.is_record for one in candidates))


def _attributes(one: _Class, classes: Classes) -> set[str]:
    return one.attributes.union(*(_attributes(base, classes) for name in one.bases for base in classes.get(name, [])))


def _class_name(base: ast.expr, function: Function, owner: _Class | None) -> str | None:
    """Returns the class name of `name` or `self.name`; None if the source does not state it."""
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "self":
        return owner.types.get(base.attr) if owner else None
    return _annotations(function).get(base.id) if isinstance(base, ast.Name) else None


def _made_here(function: Function) -> set[str]:
    """Returns local names assigned a new object, which is the result of calling a capitalized name."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _is_class(_named(node.value.func) or "")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _read_class(node: ast.ClassDef) -> _Class:
    decorators = [_named(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    bases = [name for base in node.bases if (name := _named(base)) and name != node.name]
    found = _Class("dataclass" in decorators, bases)
    found.is_record |= not any(isinstance(item, Function) for item in node.body)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.attributes.add(item.target.id)
        if isinstance(item, Function):
            found.methods.add(item.name)
            annotations = _annotations(item)
            for target, value in _assignments(item):
                if not (isinstance(target.value, ast.Name) and target.value.id == "self"):
                    continue
                found.attributes.add(target.attr)
                if isinstance(value, ast.Call) and (name := _named(value.func)) and _is_class(name):
                    found.types[target.attr] = name
                elif isinstance(value, ast.Name) and value.id in annotations:
                    found.types[target.attr] = annotations[value.id]
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Yields all functions, each with its enclosing class."""

    def walk(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[tuple[ast.ClassDef | None, Function]]:
        for child in _statements(node):
            if isinstance(child, Function):
                yield owner, child
            yield from walk(child, child if isinstance(child, ast.ClassDef) else owner)

    return walk(tree, None)


def _statements(node: ast.AST) -> list[ast.AST]:
    """Returns the statements directly in a node. Expressions, which are nine tenths of a tree, set no attribute."""
    bodies = [getattr(node, name, ()) for name in ("body", "handlers", "orelse", "finalbody", "cases")]
    return [one for body in bodies if isinstance(body, list) for one in body]


def _nested_statements(tree: ast.Module) -> Iterator[ast.AST]:
    pending = _statements(tree)
    while pending:
        node = pending.pop()
        pending += _statements(node)
        yield node


def _assignments(function: Function) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Yields attributes that a function sets, without nested functions, each with its value if it has one."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, Function | ast.ClassDef):
            continue
        pending += _statements(node)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute):
                yield target, node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            elif isinstance(target, ast.Tuple):
                yield from ((part, None) for part in target.elts if isinstance(part, ast.Attribute))


def _annotations(function: Function) -> dict[str, str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {one.arg: name for one in arguments if one.annotation and (name := _named(one.annotation))}


def _named(node: ast.expr) -> str | None:
    """Returns the last name of `Name`, `module.Name`, `"Name"` or `Name[...]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    return _named(node.value) if isinstance(node, ast.Subscript) else None
