"""Directives: the policy that a run's sidecars must apply from now on. Pure.

A directive combines the CheckpointPolicy with the workload's annotations, which take precedence: the interval and
precision, or the goals from which rank 0's sidecar chooses them by measured save costs, and their bounds. A directive
is identified by its content and is sent while the policy in force differs from the wanted one, so no delivery state is
kept. 0 disables one of the two timers (interval, steps) while training runs. If both are 0, no timer is sent: saving
cannot be disabled remotely.
"""

from __future__ import annotations

import hashlib

from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api.workload_policy import DIRECTIVE_FIELDS
from deltashard_operator.fleet.report import Directive

TIMERS = ("every_s", "every_steps")
KEPT_FIELDS = ("encoding", "differential")
"""Policy fields that, when empty, keep the value with which the pod was started."""


def _explicit_fields(policy: pb.Policy) -> tuple[str, ...]:
    """Return the fields that a directive with this policy sets, even to zero. Timers are omitted if both are 0."""
    omitted = KEPT_FIELDS if policy.every_s or policy.every_steps else (*KEPT_FIELDS, *TIMERS)
    return tuple(sorted(DIRECTIVE_FIELDS.difference(omitted)))


def directive_of(policy: pb.Policy) -> Directive:
    """Return the directive with this policy. Its id is a hash of its content."""
    found = wire.Directive(policy=policy, explicit_fields=_explicit_fields(policy))
    content = found.SerializeToString(deterministic=True)
    found.id = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") or 1
    return found


def differs(wanted: pb.Policy, in_force: pb.Policy) -> bool:
    """Return whether a directive with `wanted` would change anything."""
    names = set(_explicit_fields(wanted)) | {name for name in KEPT_FIELDS if getattr(wanted, name)}
    if wanted.goal:  # the interval is chosen; the policy only gives its initial value
        names -= set(TIMERS)
    if wanted.bits_goal:
        names.discard("encoding")
    return any(getattr(wanted, name) != getattr(in_force, name) for name in names)


def due(wanted: pb.Policy, given: int, in_force: pb.Policy) -> Directive | None:
    """Return the directive that a pod needs, or None if the wanted policy is in force or the one in force is unknown.

    `given` is the id of the directive in force in the pod. If it is 0, `in_force`, the policy of the run, is compared.
    """
    if not given and (not in_force.encoding or not differs(wanted, in_force)):
        return None
    found = directive_of(wanted)
    return found if found.id != given else None
