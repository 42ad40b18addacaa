"""Settings that algorithms bring: a class of a run with the sections of those that are registered by now."""

from functools import cache
from typing import Any, TypeVar, cast

import attrs

from rollgrad.domain.settings import SettingMetadata, section

Sections = TypeVar("Sections", bound=attrs.AttrsInstance)


def with_brought(kind: type[Sections]) -> type[Sections]:
    """Returns a class derived from `kind`, a run or a section of it, whose sections of settings that algorithms bring
    hold a section for each of them; `kind` itself where nothing brings any."""
    sections: dict[str, tuple[type[Any], str]] = {}
    for field in attrs.fields(kind):
        metadata, its_kind = SettingMetadata.of(field), cast(Any, field.type)
        if metadata.brought is not None:
            brought = tuple((name, own, own.__doc__ or "") for name, own in metadata.brought().items())
            sections[field.name] = _derived(its_kind, brought), metadata.doc
        elif attrs.has(its_kind):
            sections[field.name] = with_brought(its_kind), metadata.doc
    types = attrs.fields_dict(kind)
    changed = tuple((name, *part) for name, part in sections.items() if part[0] is not types[name].type)
    return cast(type[Sections], _derived(kind, changed))


@cache  # the same sections are one class, which values are instances of
def _derived(kind: Any, sections: tuple[tuple[str, type[Any], str], ...]) -> Any:
    """Returns a class derived from `kind` with sections of these names, types and texts, in the order of its fields."""
    if not sections:
        return kind
    order = [*attrs.fields_dict(kind), *(name for name, *_ in sections)]
    body = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__annotations__": {name: its_kind for name, its_kind, _ in sections},
        **{name: section(its_kind, " ".join(doc.split())) for name, its_kind, doc in sections},
    }
    derived = type(kind.__name__, (kind,), body)
    return attrs.define(
        kw_only=True,
        field_transformer=lambda _, fields: sorted(fields, key=lambda field: order.index(field.name)),
    )(derived)
