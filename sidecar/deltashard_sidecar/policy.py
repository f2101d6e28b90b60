"""What a run does from now on: the settings a pod started with, and the controller's newest directive over them. Pure.

    settings (environment, flags)  <  the newest commit's directive  <  the newest answer's

A directive replaces the one before. Its zero and empty fields keep what the pod started with, but for those that it
names in `whole`: they count as they are, so that a policy can go from seconds to steps and back under a run. Both
timers off is refused: no remote party may switch saving off. The one in force rides in the metadata of every commit
under `KEY`, with the workload it was given to: a sidecar of that workload, as long as no controller gave it one,
continues under it. A sidecar of another workload (a run continued by `run-id`) does not: its user chose again.

docs/design/016-directives.md has the reasons.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import BITS_RULES
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.settings import Settings, check

KEY = "deltashard/directive"
"""Name in a commit's metadata; the prefix `deltashard/` is not the user's."""
MAX_TEXT = 4096
_TIMERS = {"every_s", "every_steps"}


class BadDirective(UserError):
    """A directive with a value that no sidecar of this version can follow; the one in force stays."""


def policy_of(settings: Settings) -> pb.Policy:
    """The policy that settings state: each of its fields is a setting of the same name."""
    return pb.Policy(**{name: getattr(settings, name) for name in pb.Policy.DESCRIPTOR.fields_by_name})


def stated(policy: pb.Policy) -> dict[str, Any]:
    """Its fields that are neither zero nor empty, by name."""
    return {field.name: value for field, value in policy.ListFields()}


def changed(policy: pb.Policy, **fields: Any) -> pb.Policy:
    return pb.Policy(**stated(policy) | fields)


def chooses_bits(policy: pb.Policy) -> bool:
    return policy.bits_goal in BITS_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """What holds now."""

    initial: pb.Policy
    directive: fleet.Directive | None = None

    @property
    def policy(self) -> pb.Policy:
        if self.directive is None:
            return self.initial
        asked = self.directive.policy
        whole = {name: getattr(asked, name) for name in _whole(self.directive)}
        return changed(self.initial, **stated(asked) | whole)

    @property
    def id(self) -> int:
        return 0 if self.directive is None else self.directive.id

    def with_directive(self, directive: fleet.Directive) -> ActivePolicy:
        """What holds after `directive` came: itself when that is in force."""
        return replace(self, directive=directive) if directive.id != self.id else self


def _whole(directive: fleet.Directive) -> set[str]:
    """Fields that count as they are, of those that this version knows: a newer controller may name others."""
    return set(directive.whole).intersection(pb.Policy.DESCRIPTOR.fields_by_name)


def received(message: fleet.Directive, workload: str) -> fleet.Directive:
    """The directive of a message to a sidecar of `workload`; raises `BadDirective`."""
    directive = fleet.Directive()
    directive.CopyFrom(message)
    directive.workload = workload
    return _checked(directive)


def format_directive(directive: fleet.Directive) -> str:
    fields = {field.name: value for field, value in directive.ListFields()}
    fields |= {"policy": stated(directive.policy), "whole": list(directive.whole)}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def parse_directive(text: str) -> fleet.Directive:
    """The directive in a commit's metadata; raises `BadDirective`: any writer of the bucket may have written it."""
    unreadable = BadDirective("the recorded directive cannot be read", where=KEY)
    try:
        held = json.loads(text[: MAX_TEXT + 1])
        directive = fleet.Directive(**held)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise unreadable from None
    if isinstance(held.get("whole"), str):  # a message takes it for the list of its letters
        raise unreadable
    return _checked(directive)


def _checked(directive: fleet.Directive) -> fleet.Directive:
    where = f"directive {directive.id}"
    whole = _whole(directive)
    try:
        for name in whole | stated(directive.policy).keys():
            check(name, getattr(directive.policy, name), where=where)
    except UserError as error:
        raise BadDirective(error.what, where=error.where, remedy=error.remedy) from error
    if not directive.id or not directive.HasField("policy"):
        raise BadDirective("it has no id or no policy", where=where)
    if whole & _TIMERS and not stated(directive.policy).keys() & _TIMERS:
        remedy = "a pod of its own settings may save on demand only; no directive can have it so"
        raise BadDirective("it would turn off every timer", where=where, remedy=remedy)
    return directive
