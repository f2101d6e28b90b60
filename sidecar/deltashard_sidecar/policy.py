"""Policy of a run: the settings its pod started with, overridden by the controller's newest directive. Pure.

    settings (environment, flags)  <  the newest commit's directive  <  the newest fleet reply's directive

A directive replaces the previous one. Its zero and empty fields keep the pod's settings, except for fields listed in
`whole`, which apply as they are: a policy can thus change from seconds to steps and back during a run. A directive that
turns both timers off is rejected: no remote party may turn saving off. Every commit records the directive in force
under `KEY` in its metadata, with its workload. A sidecar of the same workload continues under it until a controller
sends one. A sidecar of another workload (a run continued by `run-id`) does not, because its user chose settings again.

See docs/design/016-directives.md for the reasons.
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
"""Name in a commit's metadata; the prefix `deltashard/` is reserved."""
MAX_TEXT = 4096
_TIMERS = {"every_s", "every_steps"}


class BadDirective(UserError):
    """A directive has a value that this version does not support; the previous one stays in force."""


def policy_of(settings: Settings) -> pb.Policy:
    """Return the policy of these settings: each of its fields is a setting of the same name."""
    return pb.Policy(**{name: getattr(settings, name) for name in pb.Policy.DESCRIPTOR.fields_by_name})


def stated(policy: pb.Policy) -> dict[str, Any]:
    return {field.name: value for field, value in policy.ListFields()}


def changed(policy: pb.Policy, **fields: Any) -> pb.Policy:
    return pb.Policy(**stated(policy) | fields)


def chooses_bits(policy: pb.Policy) -> bool:
    return policy.bits_goal in BITS_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """The initial policy and the directive in force."""

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
        """Return the policy with `directive` in force, or itself if that already is."""
        return replace(self, directive=directive) if directive.id != self.id else self


def _whole(directive: fleet.Directive) -> set[str]:
    """Return the fields listed in `whole` that this version knows: a newer controller may list others."""
    return set(directive.explicit_fields).intersection(pb.Policy.DESCRIPTOR.fields_by_name)


def received(message: fleet.Directive, workload: str) -> fleet.Directive:
    """Return the directive of a message to a sidecar of `workload`; raises `BadDirective`."""
    directive = fleet.Directive()
    directive.CopyFrom(message)
    directive.workload = workload
    return _checked(directive)


def format_directive(directive: fleet.Directive) -> str:
    fields = {field.name: value for field, value in directive.ListFields()}
    fields |= {"policy": stated(directive.policy), "explicit_fields": list(directive.explicit_fields)}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def parse_directive(text: str) -> fleet.Directive:
    """Return the directive in a commit's metadata; raises `BadDirective`: any bucket writer may have set it."""
    unreadable = BadDirective("the recorded directive cannot be read", where=KEY)
    try:
        held = json.loads(text[: MAX_TEXT + 1])
        directive = fleet.Directive(**held)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise unreadable from None
    if isinstance(held.get("explicit_fields"), str):  # protobuf would accept it as the list of its letters
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
        raise BadDirective("the directive has no id or no policy", where=where)
    if whole & _TIMERS and not stated(directive.policy).keys() & _TIMERS:
        remedy = "keep every_s or every_steps; only a pod's own settings may turn both off"
        raise BadDirective("the directive would turn off every timer", where=where, remedy=remedy)
    return directive
