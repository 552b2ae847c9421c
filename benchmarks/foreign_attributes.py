"""Attributes that are set on an object by another after its construction, found by reading the source."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Class:
    """What the source says of a class of the product."""

    is_record: bool
    """A dataclass, or a class without methods: values that whoever holds one may change."""
    bases: list[str]
    attributes: set[str] = field(default_factory=set)
    """Set on `self` in its methods, or declared in its body."""
    types: dict[str, str] = field(default_factory=dict)
    """The class of an attribute, where the source says it."""
    methods: set[str] = field(default_factory=set)


Classes = Mapping[str, list[_Class]]
"""By name; several processes may have a class of the same name."""


def foreign_attributes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Assignments to an attribute of a product's object outside of its own methods, as `path:line: target`.

    Not counted is what is set on
      * an object of somebody else's class: a protobuf message, a tensor, a part of vLLM;
      * an object in the function that makes it (`other = Replica(...)`);
      * a record (a dataclass, or a class without methods), unless what is set is a method: then it is a hook.

    The class of what stands before the dot is looked up in annotations and constructor calls. Where the source does not
    say it, the assignment counts if all classes with an attribute of that name are no records.
    """
    read = {
        node: _read_class(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
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
    """The name of the class of `name` or `self.name`; None if the source does not say it."""
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "self":
        return owner.types.get(base.attr) if owner else None
    return _annotations(function).get(base.id) if isinstance(base, ast.Name) else None


def _made_here(function: Function) -> set[str]:
    """Local names that are given a new object: what a call of a capitalized name returns."""
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
    """All functions, each with the class whose method it is or lies in."""

    def walk(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[tuple[ast.ClassDef | None, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield owner, child
            yield from walk(child, child if isinstance(child, ast.ClassDef) else owner)

    return walk(tree, None)


def _assignments(function: Function) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Attributes that a function sets, functions within it aside, each with its value if it has one of its own."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, Function | ast.ClassDef):
            continue
        pending += ast.iter_child_nodes(node)
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
    """The last name of `Name`, `module.Name`, `"Name"` and `Name[...]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    return _named(node.value) if isinstance(node, ast.Subscript) else None
