# Everything runs in .venv, which is made on first use and again when the dependencies change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test check lint types fast-tests faults soak protos docs bench clean

setup: $(READY)  ## the environment alone; afterwards .venv/bin/clickline works

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Clickline needs Python 3.11 or newer, found " + sys.version.split()[0] + ": set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

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

soak: setup  ## the long runs: a thousand switches under load, a million requests
	$(BIN)/pytest -m soak -s

protos: setup  ## compile the wire definitions again
	cd src/clickline/wire/protos && ../../../../$(BIN)/python -m grpc_tools.protoc -I . --include_imports --descriptor_set_out=../messages.binpb *.proto

docs: setup  ## print docs/config.md, docs/cli.md and docs/errors.md again from the code
	$(BIN)/python docs/generate.py

bench: setup  ## our speed beside the peers' and the limits, in one run; results go to docs/benchmarks.md
	$(BIN)/python bench/run.py

clean:
	rm -rf .venv .venv-peers demo build dist .mypy_cache .ruff_cache .pytest_cache
