# make setup | quickstart | test | chaos | clean. Every target calls setup first, which does nothing where nothing changed.
SHELL := /bin/bash
VENV := .venv/bin

.PHONY: setup quickstart test lint chaos clean
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

# kill -9 of driver, worker, engine, trainer and container at random, N in all, and a restart of the Docker engine
chaos: setup
	BURNISH_FAULTS=$(or $(N),30) $(VENV)/python -m pytest tests/e2e/test_chaos.py $(ARGS)

clean:
	rm -rf .venv build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
