"""Facts that are known about a run, and the sentences that rules say about them.

Words of the config are known first, and rules over words alone need no model and no torch. The
algorithm ("method"), rewards, prompts, the policy and the plan follow as a run starts, and each
rule runs as soon as all facts that it reads are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, reduce
from string import Formatter
from typing import Any, cast

from flowrl.config import rules, run_rules
from flowrl.config.compose import ConfigError
from flowrl.config.load import flatten
from flowrl.config.schema import Config, algorithm_schema
from flowrl.runtime.rule import Rule, as_word, conditions


class Facts:
    """Facts by dotted keys: words of a config, and objects that become known. KeyError: not yet.

    words: the tree of a config in plain values. A fact in the tree is an entry of a mapping
    ("algorithm.credit"), a fact about an object is an attribute ("plan.leaves"). options: the
    schema of the algorithm's options, which declares rules of its own.
    """

    def __init__(self, words: Mapping[str, Any], options: Any):
        self.known, self.options = dict(words), options
        unread_ = [*unread(options, "algorithm."), *unread(Config)]
        self.waiting = [*unread_, *rules.RULES, *run_rules.RULES, *declared(options)]

    def __getitem__(self, key: str) -> Any:
        try:
            return _at(self.known, key)
        except AttributeError:
            raise KeyError(key) from None

    def learn(self, **found: Any) -> None:
        """Add facts by their first names; raise one ConfigError with all that rules refuse now."""
        self.known |= found
        if refused := [sentence for _, sentence in self.said("refuse")]:
            raise ConfigError("\n".join(dict.fromkeys(refused)))

    def warnings(self) -> list[str]:
        """Warnings of the rules, and sentences about settings that were set and that nothing
        reads."""
        unread: dict[str, list[str]] = {}  # reason -> settings; each setting is named once
        for rule, why in self.said("unread"):
            seen = {setting for settings in unread.values() for setting in settings}
            new = [setting for setting in self.set_below(rule.reads[0]) if setting not in seen]
            unread.setdefault(why, []).extend(new)
        return [sentence for _, sentence in self.said("warn")] + [
            f"{', '.join(settings)} {'has' if len(settings) == 1 else 'have'} no effect: {why}"
            for why, settings in unread.items()
            if settings
        ]

    def said(self, kind: str) -> Iterator[tuple[Rule, str]]:
        """Sentences of the rules of a kind whose facts are all known; each rule is asked once."""
        waiting, self.waiting = self.waiting, []
        for rule in waiting:
            try:
                values = [self[key] for key in rule.reads] if rule.kind == kind else None
            except KeyError:
                values = None
            if values is None:
                self.waiting.append(rule)
            elif sentence := self.sentence(rule, values):
                yield rule, sentence

    def sentence(self, rule: Rule, values: list[Any]) -> str:
        """The sentence of a rule about these values; "": it has none."""
        if rule.when is not None:
            if not rule.when(*values):
                return ""
        elif isinstance(rule.says, str) and not all(map(self.is_set, rule.reads)):
            return ""
        if not isinstance(rule.says, str):
            return rule.says(*values)
        words = [as_word(key, value) for key, value in zip(rule.reads, values, strict=True)]
        return _BY_KEY.vformat(rule.says, words, cast(Any, self))

    def is_set(self, key: str) -> bool:
        """Whether a setting differs from its default."""
        return bool(self[key] != _at(self.usual(), key))

    def usual(self) -> dict[str, Any]:
        """The tree of a config in which nothing was set."""
        return _defaults() | {"algorithm": plain(self.options.model_construct())}

    def set_below(self, key: str) -> list[str]:
        """Settings at a key, or in the section of that name, that differ from their defaults."""
        now, before = (flatten({key: _at(tree, key)}) for tree in (self.known, self.usual()))
        return [f"{name}={value}" for name, value in now.items() if before.get(name) != value]


class _ByKey(Formatter):
    """Fills {batch.group} with the fact of that key."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        number = field_name.isdigit()
        return (args[int(field_name)] if number else kwargs[field_name]), field_name


_BY_KEY = _ByKey()


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """The value that a tree holds at a dotted key."""
    return reduce(_inside, key.split("."), tree)


def _inside(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


@cache
def _defaults() -> dict[str, Any]:
    return plain(Config.model_construct())


def plain(section: Any) -> dict[str, Any]:
    """A section in plain values."""
    return section.model_dump(mode="json")  # type: ignore[no-any-return]


@cache
def declared(options: Any) -> tuple[Rule, ...]:
    """Rules of an algorithm's options, those of its bases first."""
    return tuple(rule for cls in options.__mro__[::-1] for rule in vars(cls).get("rules", ()))


@cache
def unread(schema: Any, prefix: str = "") -> tuple[Rule, ...]:
    """Rules about settings that are read only under others."""
    return tuple(c.rule(key) for key, found in conditions(schema, prefix) for c in found)


def of_config(cfg: Config, **found: Any) -> Facts:
    """Facts of a config and of the objects found; raise ConfigError where rules refuse them."""
    method = found.get("method")
    options = type(method.config) if method else algorithm_schema(cfg.algorithm["name"])
    facts = Facts(plain(cfg), options)
    facts.learn(**found)
    return facts
