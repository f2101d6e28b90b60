"""What a run does from now on: the settings a pod started with, and the controller's newest directive over them. Pure.

    settings (environment, flags)  <  directive by its generation

A directive is whole: it replaces the one before, and its zero and empty fields keep what the pod started with. With
`timers` its interval and its steps count as they are, so that a policy can go from seconds to steps and back under a
run; both off is refused, for nobody may switch saving off from afar. Only a newer generation counts, so late and
repeated messages change nothing. The newest one rides in the metadata of every commit under `KEY`, with the workload it
was given to: a sidecar of that workload that starts while no controller is there goes on under it. A sidecar of another
workload (a run continued by `run-id`) does not: its user chose anew.

docs/design/016-directives.md has the reasons.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from deltashard_checkpoint.deciding.goal import goal
from deltashard_checkpoint.deciding.precision import encodings_of
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import BITS_RULES, CHOICES
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.settings import Settings

KEY = "deltashard/directive"
"""Name in a commit's metadata; the prefix `deltashard/` is not the user's."""
MAX_TEXT = 4096
_MAX_INT = (1 << 63) - 1
_CHOSEN = ("encoding", "differential", "state_encoding", "bits_goal")
"""Fields that take a word of `CHOICES`."""
_WORDS = (*_CHOSEN, "goal", "tables")
_SECONDS = ("every_s", "least_s", "most_s")
_COUNTS = ("every_steps", "least_bits")


class BadDirective(UserError):
    """A directive with a value that no sidecar of this version can follow; the one in force stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a run saves. In a directive, 0 and "" keep what the pod was started with."""

    every_s: float = 0.0
    every_steps: int = 0
    encoding: str = ""
    differential: str = ""
    state_encoding: str = ""
    goal: str = ""
    least_s: float = 0.0
    most_s: float = 0.0
    bits_goal: str = ""
    least_bits: int = 0
    tables: str = ""

    @property
    def chooses_bits(self) -> bool:
        return self.bits_goal in BITS_RULES

    @classmethod
    def of(cls, source: Settings | pb.Policy) -> Policy:
        """The policy that settings, or a message, hold."""
        return cls(**{each.name: getattr(source, each.name) for each in fields(cls)})

    def message(self) -> pb.Policy:
        return pb.Policy(**{each.name: getattr(self, each.name) for each in fields(self)})

    def over(self, base: Policy) -> Policy:
        """`base` with every field that is set here."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(base, **{name: value for name, value in said.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """A policy that the controller gave, numbered."""

    generation: int
    policy: Policy
    timers: bool = False
    """`every_s` and `every_steps` count as they are: 0 is off."""
    workload: str = ""
    """UID of the workload it was given to."""

    def text(self) -> str:
        said = {each.name: getattr(self.policy, each.name) for each in fields(self.policy)}
        document = {
            "generation": self.generation,
            "policy": {name: value for name, value in said.items() if value},
            "workload": self.workload,
            **({"timers": True} if self.timers else {}),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """What holds now."""

    started_with: Policy
    directive: Directive | None = None

    @property
    def policy(self) -> Policy:
        if self.directive is None:
            return self.started_with
        asked = self.directive.policy
        policy = asked.over(self.started_with)
        if self.directive.timers:
            policy = replace(policy, every_s=asked.every_s, every_steps=asked.every_steps)
        return policy

    @property
    def generation(self) -> int:
        """Generation of the directive; 0: none."""
        return 0 if self.directive is None else self.directive.generation

    def after(self, directive: Directive) -> InForce:
        """What holds after `directive` came: itself when that is not newer."""
        return replace(self, directive=directive) if directive.generation > self.generation else self


def received(message: fleet.Directive, workload: str) -> Directive:
    """The directive of a message to a sidecar of `workload`; raises `BadDirective`."""
    policy = Policy.of(message.policy)
    return _checked(
        Directive(generation=message.generation, policy=policy, timers=message.timers, workload=workload)
    )


def recorded(text: str) -> Directive:
    """The directive in a commit's metadata; raises `BadDirective`: whoever can write the bucket wrote it."""
    try:
        document: Any = json.loads(text[: MAX_TEXT + 1])
        policy = Policy(**document["policy"])
        directive = Directive(
            generation=document["generation"],
            policy=policy,
            timers=document.get("timers", False),
            workload=document["workload"],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadDirective("the recorded directive cannot be read", where=KEY) from None
    words = (*(getattr(policy, name) for name in _WORDS), directive.workload)
    if (
        any(type(getattr(policy, name)) not in (int, float) for name in _SECONDS)
        or any(type(getattr(policy, name)) is not int for name in _COUNTS)
        or type(directive.generation) is not int
        or type(directive.timers) is not bool
        or not all(type(word) is str for word in words)
    ):
        raise BadDirective("the recorded directive has a value of a wrong type", where=KEY)
    return _checked(directive)


def _checked(directive: Directive) -> Directive:
    policy = directive.policy
    for name in _CHOSEN:
        value, known = getattr(policy, name), CHOICES[name]
        if value and value not in known:
            raise BadDirective(
                f"{name} is {value[:40]!r}",
                where=f"directive {directive.generation}",
                remedy=f"one of {', '.join(known)}; is this sidecar older than the controller?",
            )
    try:
        if policy.goal:
            goal(policy.goal, where=f"directive {directive.generation}")
        encodings_of(policy.tables, where=f"directive {directive.generation}")
    except UserError as error:
        raise BadDirective(error.what, where=error.where, remedy=error.remedy) from error
    numbers_fit = (
        0 < directive.generation <= _MAX_INT
        and all(0 <= getattr(policy, name) <= _MAX_INT for name in _COUNTS)
        and all(0 <= getattr(policy, name) <= _MAX_INT for name in _SECONDS)  # nor is NaN
    )
    if not numbers_fit:
        raise BadDirective("a number is out of range", where=f"directive {directive.generation}")
    if directive.timers and not policy.every_s and not policy.every_steps:
        raise BadDirective(
            "it would turn off every timer",
            where=f"directive {directive.generation}",
            remedy="a pod of its own settings may save on demand only; no directive can have it so",
        )
    return directive
