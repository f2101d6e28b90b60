"""A sidecar warns where numpy encodes, and serves by it in no pod."""

from __future__ import annotations

import json

import pytest
from deltashard_checkpoint.codecs import kernel_choice, native_kernel, numpy_kernel
from deltashard_checkpoint.errors import UserError
from deltashard_sidecar import settings
from deltashard_sidecar.main import _judge_kernels
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure

PLACE = ["--url", "file:///store", "--run", "r", "--dir", "/dir", "--cache-dir", "/cache"]


@pytest.mark.parametrize("kernels", [numpy_kernel, native_kernel])
def test_numpy_is_a_warning_and_a_metric(monkeypatch, capfd, kernels):
    monkeypatch.setattr(kernel_choice, "active", lambda: kernels)
    metrics, slow = Metrics(), kernels is numpy_kernel
    _judge_kernels(settings.load(PLACE, {}), metrics, configure("warning", run="r"))
    assert metrics.registry.get_sample_value("deltashard_numpy_kernels") == slow
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["sidecar.numpy_kernels"] * slow


def test_numpy_is_refused_in_a_pod(monkeypatch):
    monkeypatch.setattr(kernel_choice, "active", lambda: numpy_kernel)
    config = settings.load([*PLACE, "--workload-uid", "w-1"], {})
    with pytest.raises(UserError, match="too slow for a pod"):
        _judge_kernels(config, Metrics(), configure("warning", run="r"))
