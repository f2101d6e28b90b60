# One word per task. Every target works as the first command on a machine with Python 3.11+, make and git.
PYTHON ?= python3
UV = .bootstrap/bin/uv
RUN = .venv/bin/python
STORE ?= file
SERVERS = minio etcd helm kubectl coredns promql kwok jobset kueue training-operator kubeflow-trainer kubernetes fake-gcs-server shared-mount

CLUSTER = UV=$(abspath $(UV)) $(RUN) -m pytest tests/cluster --numprocesses 5 --dist loadfile --no-loadscope-reorder --durations=0 --durations-min=1

# Whatever the machine says: without compiled files each process that tests start compiles torch again, for seconds.
export PYTHONDONTWRITEBYTECODE :=

# The oldest torch that pyproject.toml promises and one between it and the newest, which all other tests have.
TORCHES = 2.6.0 2.11.0
RESUME = tests/integration/trainer/test_train_resume.py
TORCH_TESTS = tests/unit/trainer/loader tests/unit/trainer/optimizer tests/unit/trainer/tracking/test_gradient.py tests/unit/trainer/state/test_rng.py \
	tests/unit/trainer/snapshot/test_precopy_programs.py::test_stored_rows_equal_the_live_rows[cpu] \
	tests/unit/checkpoint/codecs/test_quantizer.py::test_plain_rows_equal_torch_prepack \
	$(RESUME)::test_restored_state_is_decode_encode_of_snapshot $(RESUME)::test_pins_seqs_and_steps_can_be_restored \
	$(RESUME)::test_trainer_on_synthetic_baselines_resumes_exactly

.PHONY: venv servers charts demo docs reference coverage test test-fast test-torch test-cluster test-cluster-full test-troubles lint types contracts proto bench bench-cuda bench-fleet bench-group bench-ranks papers clean
venv: .venv/.synced

$(UV):
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "deltashard needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .bootstrap
	.bootstrap/bin/pip install -q 'uv>=0.9'

.venv/.synced: $(UV) pyproject.toml uv.lock setup.py checkpoint/deltashard_checkpoint/codecs/_native.c
	$(UV) sync --frozen --all-extras --compile-bytecode --python $(PYTHON)
	touch $@

# RANKS=4: the same data on so many ranks of TorchRec under torchrun, out/demo-ranks.html.
demo: venv
	$(RUN) $(if $(RANKS),examples/demo/ranks/run.py --ranks $(RANKS),examples/demo/run.py) --store $(STORE)

# The servers that tests run, built once per machine and before pytest begins. Without Go (for Azurite: npm) their tests are skipped, loudly.
servers:
	@if command -v go >/dev/null; then for tool in $(SERVERS); do tools/build $$tool >/dev/null || exit 1; done; \
	elif [ -n "$$CI" ]; then echo "no Go: it is required in CI"; exit 1; \
	else echo "*** no Go on this machine: tests on real servers will be skipped ***"; fi
	@if command -v npm >/dev/null; then tools/build azurite >/dev/null; \
	elif [ -n "$$CI" ]; then echo "no npm: it is required in CI"; exit 1; \
	else echo "*** no npm on this machine: tests on Azure's storage (Azurite) will be skipped ***"; fi

# A file's tests share their processes and servers, so a file stays on one worker.
test: venv
	@echo "make test: 35 minutes in all on two idle cores; the first time on a machine 15 more, to build the servers"
	@echo "make test, 1 of 3: the servers that tests need (nothing to do if they are built)"
	@$(MAKE) --no-print-directory servers
	@echo "make test, 2 of 3: tests on this machine alone (about 20 minutes)"
	$(RUN) -m pytest tests --ignore tests/cluster --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=50 --durations-min=10
	@echo "make test, 3 of 3: a real Kubernetes on this machine (about 15 minutes)"
	$(MAKE) test-cluster

# tests/unit starts no process and serves no port; tests/integration is the same rooms
# with processes and real servers. The fast ones take a minute; `test` has the slow ones, too.
test-fast: venv
	$(RUN) -m pytest tests/unit -m 'not slow' --numprocesses 2 --dist loadfile

# Trainer state, optimizers, tracking, loaders and whole restores under older torches: two minutes, and as long again to install.
test-torch: venv
	@for torch in $(TORCHES); do echo "torch $$torch"; \
	DELTASHARD_TRACKING_EXAMPLES=40 UV=$(abspath $(UV)) tools/torch-tests $$torch --numprocesses 2 --dist loadfile $(TORCH_TESTS) || exit 1; done

# The chart alone, which `test` has, too: Helm's lint, its README, every value, and releases on a real API server.
charts: venv servers
	$(RUN) -m pytest tests/integration/charts tests/integration/operator/test_chart_test.py --numprocesses 2 --dist loadfile

# A real Kubernetes on this machine, as root: it changes the host while it runs, and puts it back.
test-cluster: venv servers
	tests/cluster/packages
	DELTASHARD_TEST_CLUSTER=1 $(CLUSTER)

# The same with longer outages, and every scenario three times that leaves the cluster as it was.
test-cluster-full: venv servers
	tests/cluster/packages
	DELTASHARD_TEST_CLUSTER=full $(CLUSTER)

# An hour of lives among the troubles of networks and object stores, before a real MinIO; `test` has a minute of it.
test-troubles: venv servers
	DELTASHARD_TEST_FAULTS_S=3600 $(RUN) -m pytest tests/crash/test_s3_faults.py -s

# The pages in docs/reference that are generated from the code. A unit test fails if one is stale.
reference: venv
	$(RUN) -m tools.reference

# The documentation site, out/site. A warning is an error: a dead link, a page that the navigation does not list.
docs: venv
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

# Unit tests with branch coverage; pyproject.toml has the floor.
coverage: venv
	$(RUN) -m pytest tests/unit -m 'not slow' --numprocesses 2 --dist loadfile --cov --cov-report=term:skip-covered

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff check --preview --select PLR0904 checkpoint trainer sidecar cli operator
	.venv/bin/ruff format --check .
	$(RUN) tools/budget.py
	$(RUN) tools/words.py
	.venv/bin/codespell
	.venv/bin/hadolint images/Dockerfile

types: venv
	.venv/bin/mypy

contracts: venv
	.venv/bin/lint-imports --no-cache
	proto/generate --check
	$(RUN) tools/crds.py --check

bench: venv
	$(RUN) bench/run.py

# Four ranks, 2 GiB, against torch.distributed.checkpoint on MinIO: out/group.json.
bench-group: venv
	$(RUN) bench/run.py group --out out/group.json

# 8 GiB of tables on a GPU, against torch.save and torch.distributed.checkpoint: out/cuda.json.
bench-cuda: venv
	$(RUN) bench/run.py gpu --out out/cuda.json

# 4,096 ranks with metadata only: some minutes, 8 GB of memory; out/ranks.json, docs/scale-ranks.md.
bench-ranks: venv
	$(RUN) bench/run.py ranks --out out/ranks.json

# 5,000 annotated pods and their sidecars on a control plane without kubelets: out/fleet.json, docs/kubernetes/scale.md.
bench-fleet: venv servers
	$(RUN) bench/fleet.py

# What the papers claim, measured on this machine: 15 minutes on two idle cores; out/papers.json, docs/papers.md.
papers: venv
	$(RUN) bench/papers/run.py

clean:
	rm -rf .venv .bootstrap out build
