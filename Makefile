# make setup | quickstart | test | clean. Every target calls setup first, which does nothing where nothing changed.
SHELL := /bin/bash
VENV := .venv/bin

.PHONY: setup quickstart test lint clean
.SILENT:

setup:
	bash .ci/setup.sh

# synth -> SFT -> RL -> eval of the tiny policy in Docker; the report is runs/quickstart/report/summary.json
quickstart: setup
	$(VENV)/burnish quickstart $(ARGS)

lint: setup
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/pyright

# pytest comes last, so that its closing line is the last line; ARGS="tests/rollout -k ledger" narrows it
test: lint
	$(VENV)/python -m pytest --durations=15 $(ARGS)

clean:
	rm -rf .venv build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
