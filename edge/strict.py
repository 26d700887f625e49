"""From a YAML text to typed values, with every problem found at once. Pure: no files.

msgspec stops at the first error and names no line. A person who edits a file wants all of them, each with its line, the
value found, what is allowed, and for a misspelt key the nearest right one. So the sections are walked here, and msgspec
judges only the leaves.
"""

from __future__ import annotations

import difflib
import re
import types
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct

from edge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["map_paths", "parse", "paths_of"]

S = TypeVar("S", bound=Struct)
_MISSING = object()


def parse(
    text: str, kind: type[S], *, source: str, check: Callable[[S], list[tuple[str, str]]] = lambda _value: []
) -> S:
    """Parse YAML into a Struct.

    Args:
        text: the YAML document.
        kind: the Struct class of the whole document.
        source: name of the file, for messages.
        check: finds problems between keys of a document whose single keys are right: pairs of key and text.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[tuple[str, str]] = []
    lines: dict[str, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError([f"{source}: is empty; expected a deployment that starts with 'version: 1'"])
        _map_lines(root, "", lines, problems, set())
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError([f"{where}: is not valid YAML: {error.problem or error.context}"]) from None
    except RecursionError:
        raise ConfigError([f"{source}: is nested too deeply for a deployment"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{source}: is not valid YAML: {' '.join(str(error).split())}"]) from None
    value = _convert(document, kind, "", problems)
    if not problems:
        problems = check(cast("S", value))
    if problems:
        # dict.fromkeys: the union walk may see a problem twice
        raise ConfigError(list(dict.fromkeys(_render(source, lines, key, text) for key, text in problems)))
    return cast("S", value)


def paths_of(section: Struct, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, path) for every field that is declared as a path and set."""
    for key, value, is_path in _fields(section, prefix):
        if is_path:
            for item in value if isinstance(value, list) else [value]:
                yield key, item
        elif isinstance(value, Struct):
            yield from paths_of(value, f"{key}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Struct):
                    yield from paths_of(item, f"{key}[{index}].")


def map_paths(section: S, change: Callable[[str], str]) -> S:
    """Return a copy of a section in which every path has been passed through ``change``."""

    def mapped(value: Any, *, is_path: bool) -> Any:
        if isinstance(value, Struct):
            return map_paths(value, change)
        if isinstance(value, list):
            return [mapped(item, is_path=is_path) for item in value]
        return change(value) if is_path and isinstance(value, str) else value

    changed = {key: mapped(value, is_path=is_path) for key, value, is_path in _fields(section, "")}
    return msgspec.structs.replace(section, **changed)


def _fields(section: Struct, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    hints = get_type_hints(type(section), include_extras=True)
    for field in section.__struct_fields__:
        value = getattr(section, field)
        if value is not None:
            yield f"{prefix}{field}", value, _is_path(hints[field])


def _is_path(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        return any((meta.extra or {}).get("path") for meta in metas if isinstance(meta, Meta)) or _is_path(inner)
    return get_origin(hint) in (Union, types.UnionType) and any(_is_path(arm) for arm in get_args(hint))


def _map_lines(
    node: yaml.Node,
    path: str,
    lines: dict[str, int],
    problems: list[tuple[str, str]],
    seen: set[yaml.Node],
    above: tuple[yaml.Node, ...] = (),
) -> None:
    """Note the line of every key, and report the keys that are given twice."""
    if node in above:
        raise yaml.MarkedYAMLError(problem="an alias stands inside its own section", problem_mark=node.start_mark)
    above = (*above, node)
    lines.setdefault(path, node.start_mark.line + 1)
    if node in seen:
        return  # an alias: walking what it repeats each time would take for ever where aliases hold aliases
    seen.add(node)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = f"{path}.{key.value}" if path else str(key.value)
            if child in lines:
                problems.append((child, f"is given twice, first in line {lines[child]}"))
                continue
            lines[child] = key.start_mark.line + 1
            _map_lines(value, child, lines, problems, seen, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _map_lines(value, f"{path}[{index}]", lines, problems, seen, above)


def _render(source: str, lines: dict[str, int], key: str, text: str) -> str:
    line, at = None, key
    while line is None:
        line = lines.get(at)
        if not at:
            break
        at = re.sub(r"(\.?[^.\[]+|\[\d+\])$", "", at)
    where = f"{source}:{line}" if line is not None else source
    return f"{where}: {key}: {text}" if key else f"{where}: {text}"


def _convert(value: Any, hint: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """Convert one value, appending to ``problems``; what is returned after a problem is not used."""
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        if not _structs(inner) and not _goes_by_entry(inner):
            return _leaf(value, hint, path, problems)
        converted = _convert(value, inner, path, problems)
        for meta in metas:
            if isinstance(meta, Meta) and isinstance(value, list) and len(value) < (meta.min_length or 0):
                problems.append((path, f"is empty; at least {meta.min_length} entry is needed"))
        return converted
    if value is None and type(None) in get_args(hint):
        return None
    structs = _structs(hint)
    if structs:
        return _section(value, structs, path, problems)
    if _goes_by_entry(hint):
        if not isinstance(value, list):
            problems.append((path, f"is {_show(value)}; expected a list, each entry starting with '- '"))
            return _MISSING
        (item,) = get_args(hint)
        return [_convert(entry, item, f"{path}[{index}]", problems) for index, entry in enumerate(value)]
    return _leaf(value, hint, path, problems)


def _structs(hint: Any) -> list[type[Struct]]:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [arm for arm in arms if isinstance(arm, type) and issubclass(arm, Struct)]


def _goes_by_entry(hint: Any) -> bool:
    """Whether it is a list whose entries have problems of their own: of sections, or of choices."""
    if get_origin(hint) is not list:
        return False
    (entry,) = get_args(hint)
    return bool(_structs(entry)) or get_origin(entry) is Literal


def _section(value: Any, kinds: list[type[Struct]], path: str, problems: list[tuple[str, str]]) -> Any:
    dot = f"{path}." if path else ""
    if not isinstance(value, dict):
        names = [field for kind in kinds for field in kind.__struct_fields__]
        problems.append((path, f"is {_show(value)}; expected a section with keys such as {', '.join(names[:4])}"))
        return _MISSING
    kind = kinds[0]
    tag_field = kind.__struct_config__.tag_field
    if tag_field is not None:
        tags = {candidate.__struct_config__.tag: candidate for candidate in kinds}
        tag = value.get(tag_field, _MISSING)
        if not isinstance(tag, str) or tag not in tags:
            found = "is missing" if tag is _MISSING else f"is {_show(tag)}"
            allowed = ", ".join(map(str, tags))
            problems.append((f"{dot}{tag_field}", f"{found}; allowed: {allowed}{_nearest(tag, tags)}"))
            return _MISSING
        kind = tags[tag]
    hints = get_type_hints(kind, include_extras=True)
    known = [*kind.__struct_fields__, *([tag_field] if tag_field else [])]
    for key in value:
        if key not in known:
            problems.append((f"{dot}{key}", f"is not a known key{_nearest(key, known) or '; ' + _known(known)}"))
    before = len(problems)
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name in value:
            fields[field.name] = _convert(value[field.name], hints[field.name], f"{dot}{field.name}", problems)
        elif field.required:
            problems.append((f"{dot}{field.name}", "is missing"))
    return kind(**fields) if len(problems) == before else _MISSING


def _leaf(value: Any, hint: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        where, text = path, str(error)
        inner = re.search(r" - at `\$(.*)`$", text)
        if inner:
            where, text = path + inner[1].replace("[...]", ""), text[: inner.start()]
        problems.append((where, f"is {_show(value)}; {_expected(text, hint, value)}"))
        return _MISSING


def _expected(text: str, hint: Any, value: Any) -> str:
    choices = _choices(hint)
    if choices:
        return f"allowed: {', '.join(map(str, choices))}{_nearest(value, choices)}"
    says = _says(hint)
    if says:
        return f"expected {says}"
    words = {"`str`": "text", "`int`": "a whole number", "`float`": "a number", "`bool`": "true or false"}
    words |= {"`array`": "a list", "`object`": "a section", "`null`": "nothing", "`str | array`": "text or a list"}
    words |= {"`int | null`": "a whole number", "`float | null`": "a number", "`str | null`": "text"}
    text = re.sub(r", got `.*`$", "", text)
    for word, plain in words.items():
        text = text.replace(word, plain)
    return text[0].lower() + text[1:]


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for arm in get_args(hint) for choice in _choices(arm)] if get_args(hint) else []


def _says(hint: Any) -> str | None:
    for arm in get_args(hint):
        if isinstance(arm, Meta) and (arm.extra or {}).get("says"):
            return cast("str", (arm.extra or {})["says"])
        found = _says(arm)
        if found:
            return found
    return None


def _nearest(word: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _known(names: list[str]) -> str:
    return f"allowed: {', '.join(names)}"


def _show(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return str(value)
