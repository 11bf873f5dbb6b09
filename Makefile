# Everything runs in .venv, made from the lock file. The two commands for a fresh Debian machine are
# `make demo` and `make test`; both do their own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PY := .venv/bin/python
RUN := .venv/bin

.PHONY: help setup demo test lint types unit e2e soak bench proto clean

help: ## Show this list
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready ## Make the virtual environment from the lock file

.venv/.ready: pyproject.toml uv.lock scripts/setup
	@scripts/setup
	@touch $@

demo: setup ## The story of a gang, a fault and a recovery on a real local cluster
	@$(RUN)/gpunode demo

test: lint types unit e2e ## Everything that must be green

lint: setup ## Style, imports, package map
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/lint-imports

types: setup ## mypy --strict
	@$(RUN)/mypy

unit: setup ## Tests without a cluster
	@$(RUN)/pytest -q -m "not e2e and not soak" --durations=10

e2e: setup ## Tests on the local cluster (root)
	@$(RUN)/gpunode cluster build
	@$(RUN)/pytest -q -m "e2e and not soak" --durations=10

soak: setup ## The large counts, whole; writes build/soak.json
	@$(PY) -m tests.soak $(if $(NAME),--name "$(NAME)")

bench: setup ## Measure; writes build/bench.json. NAME=... measures one anew
	@$(PY) -m tests.bench $(if $(NAME),--name "$(NAME)")

proto: setup ## Generate the kubelet's messages anew from src/gpunode/kubelet/proto/*.proto
	@$(PY) -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/gpunode/kubelet/proto/*.proto

clean: ## Remove what make built in the checkout (caches outside it stay)
	@rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
