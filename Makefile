# The commands a contributor needs. Each makes the virtual environment it runs in; see scripts/dev.py.

.PHONY: help demo test check format clean
.DEFAULT_GOAL := help

SECONDS ?= 15
SAVE ?=

help:  ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

demo:  ## Calibrate, evaluate, run the daemon, results over MQTT (SECONDS=15, SAVE=DIR for pictures)
	@python3 scripts/dev.py demo --seconds $(SECONDS) $(if $(SAVE),--save "$(SAVE)")

test:  ## Run the tests (ARGS="-k name" passes options to pytest)
	@python3 scripts/dev.py test $(ARGS)

check:  ## Lint and type-check, as CI does
	@python3 scripts/dev.py check

format:  ## Format the code
	@python3 scripts/dev.py format

clean:  ## Remove what the other commands made
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
