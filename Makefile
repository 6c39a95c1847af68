# Everything runs in .venv, which is made on first use and again when the dependencies change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup browser demo test check lint types fast-tests faults soak soak-parts ray-versions fuzz protos docs screenshots bench bench-scale clean audit sbom release

setup: $(READY)  ## the environment alone; afterwards .venv/bin/clickline works

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Clickline needs Python 3.11 or newer, found " + sys.version.split()[0] + ": set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

browser:  ## Chromium, for the tests of the studio and the report; without it they are skipped
	command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk; }

demo: setup  ## synthetic logs to an endpoint, scored over gRPC and HTTP, and down again
	@if [ -e demo/clickline.yaml ]; then $(BIN)/clickline down -c demo/clickline.yaml; fi
	rm -rf demo
	$(BIN)/clickline init demo --preset criteo
	$(BIN)/clickline sample --format criteo --rows 300000 --out demo/data
	$(BIN)/clickline up -c demo/clickline.yaml --detach --wait
	$(BIN)/clickline status -c demo/clickline.yaml
	$(BIN)/clickline predict -c demo/clickline.yaml -i demo/data/eval.tsv --protocol grpc
	$(BIN)/clickline predict -c demo/clickline.yaml -i demo/data/eval.tsv --protocol http
	$(BIN)/clickline down -c demo/clickline.yaml

lint: setup  ## format, lint, levels of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

fast-tests: setup
	$(BIN)/pytest -n 2 --dist loadfile -m 'not slow and not soak and not faults'

check: lint types fast-tests  ## yes or no in under two minutes

test: lint types  ## everything
	$(BIN)/pytest -n 2 --dist loadfile

faults: setup  ## kill every role of a cluster run at every named moment
	$(BIN)/pytest -m faults

MINUTES ?= 10
soak: setup  ## the whole system under load while its processes are killed; MINUTES=60 for longer, SEED=N for a run again
	$(BIN)/python bench/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak-parts: setup  ## long runs of single parts: a thousand switches under load, a million requests, 200 hours
	$(BIN)/pytest -m soak -s

OTHER_RAY ?= 2.59.0
RAY_TESTS := tests/distributed tests/training/cluster/test_session.py
ray-versions: setup .venv-ray/$(OTHER_RAY)/ray  ## all that uses Ray's private modules (distributed/ray_internals.py) with two versions of Ray
	$(BIN)/pytest $(RAY_TESTS)
	PYTHONPATH=$(CURDIR)/.venv-ray/$(OTHER_RAY) CLICKLINE_TEST_RAY=$(OTHER_RAY) $(BIN)/pytest $(RAY_TESTS)

# Before .venv on the path, so that only Ray itself is another.
.venv-ray/%/ray: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-ray/$* ray==$*
	@touch $@

fuzz: SECONDS = 30
fuzz: setup  ## all that reads what others wrote, fuzzed; SECONDS=120 for longer each, see docs/fuzzing.md
	$(BIN)/python -m fuzz --seconds $(SECONDS)

protos: setup  ## compile the wire definitions again
	cd src/clickline/wire/protos && ../../../../$(BIN)/python -m grpc_tools.protoc -I . --include_imports --descriptor_set_out=../messages.binpb *.proto

docs: setup  ## print docs/config.md, docs/cli.md and docs/errors.md again from the code
	$(BIN)/python docs/generate.py

screenshots: setup browser  ## capture docs/images/*.png again from a real run
	$(BIN)/python docs/screenshots.py

bench: setup  ## our speed beside the peers' and the limits, in one run; results go to docs/benchmarks.md
	$(BIN)/python bench/run.py

ROWS ?= 100000000
SECONDS ?= 3600
bench-scale: setup  ## how costs grow with rows, ids, dim and shards, up to ROWS within SECONDS; the same command goes on
	$(BIN)/python bench/scale.py --rows $(ROWS) --seconds $(SECONDS)

audit: .venv-release/ready  ## known vulnerabilities of what constraints.txt names; fails as well when it cannot be known
	.venv-release/bin/python release/audit.py

sbom: setup .venv-release/ready  ## the software bill of materials of .venv: dist/sbom.cdx.json
	.venv-release/bin/python release/sbom.py .venv dist/sbom.cdx.json

release: setup  ## wheel and source archive of the last commit, the same bytes everywhere, with SHA256SUMS: dist/
	$(BIN)/python release/build.py

.venv-release/ready: release/requirements.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check --requirement release/requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-peers .venv-ray .venv-release demo build dist .mypy_cache .ruff_cache .pytest_cache
