# Thin on purpose: scripts/bootstrap sets the machine up, noxfile.py holds the commands.

MODEL ?= smollm2-135m-instruct
ARGS ?=
NOX := .venv-gil/bin/nox --session

.PHONY: help serve test env lint types gate micro bench clean-env clean-cache

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

serve: env  ## start the server: make serve MODEL=/path/or/hub-id ARGS="--port 8000"
	exec .venv/bin/python -X gil=0 -m ftserve $(ARGS) $(MODEL)

test: env  ## run lint, types, the gate and all tests
	$(NOX) lint types gate tests_gil tests

env:  ## make .venv and .venv-gil, fetch the default model; quick when all is there
	@python3 -m scripts.bootstrap env

lint: env  ## check style and formatting
	$(NOX) lint

types: env  ## check types
	$(NOX) types

gate: env  ## compare CPU time with bare libraries and with the base commit
	$(NOX) gate

micro: env  ## time the small steps of a request
	$(NOX) micro

bench: env  ## print the tables of the README from scratch
	$(NOX) bench

clean-env:  ## remove .venv and .venv-gil
	python3 -m scripts.bootstrap clean-env

clean-cache:  ## remove what was built and fetched for every checkout
	python3 -m scripts.bootstrap clean-cache
