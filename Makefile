# `make` lists the targets. Variables:
#   PYTHON   makes .venv and builds (3.9 or newer); to change it, `make clean` first
#   JOBS     how many tests run at once
#   ARGS     more for pytest or the benchmarks: make test ARGS="-k registry -x"
PYTHON ?= python3
JOBS ?= 4
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PYZ := $(CURDIR)/mam.pyz
# Debian keeps mosquitto and ip where only root's PATH looks.
export PATH := $(PATH):/usr/sbin:/sbin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-agents bench soak lint pyz tools clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: pyz ## a guided tour with the built mam.pyz
	@MAM_PYZ=$(PYZ) bash tests/demo.sh

test: pyz tools $(VENV)/.stamp ## all tests but soak and test-agents
	MAM_PYZ=$(PYZ) $(PY) -m pytest tests -n $(JOBS) --dist worksteal -rs $(ARGS)

test-agents: pyz tools $(VENV)/.stamp ## real agents from npm in tmux panes, with a model on 127.0.0.1
	MAM_PYZ=$(PYZ) $(PY) -m pytest tests/test_agents.py -m agents -rsP $(ARGS)

bench: pyz $(VENV)/.stamp ## what things cost, against a baseline of the same run
	MAM_PYZ=$(PYZ) $(PY) tests/bench.py $(ARGS)

soak: pyz tools $(VENV)/.stamp ## the long tests, under injected faults
	MAM_PYZ=$(PYZ) $(PY) -m pytest tests -m soak -n $(JOBS) --dist worksteal -rs $(ARGS)

lint: $(VENV)/.stamp ## ruff and mypy
	$(PY) -m ruff check mam.py tests
	$(PY) -m mypy mam.py

pyz: mam.pyz ## build mam.pyz

clean: ## remove all that was built or installed here
	rm -rf mam.pyz $(VENV) .build .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

mam.pyz: mam.py build.sh LICENSE
	@PYTHON="$(PYTHON)" ./build.sh $@

# Made anew when the pins change, so that no package of older ones stays.
$(VENV)/.stamp: tests/requirements.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip --disable-pip-version-check -q install -r $<
	@touch $@

# What no Python package brings. Only root on Debian can be helped; elsewhere, and when it fails, the tests that
# need one are skipped, and say so.
tools:
	@missing=; for tool in mosquitto mosquitto_pub tmux ip; do \
	    command -v $$tool >/dev/null || missing="$$missing $$tool"; \
	done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get -qq update && \
	      apt-get -qq -y --no-install-recommends install mosquitto mosquitto-clients tmux iproute2; \
	    } </dev/null >/dev/null 2>&1 || echo "not installed:$$missing"; \
	elif [ -n "$$missing" ]; then \
	    echo "not installed:$$missing"; \
	fi
