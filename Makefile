# Starling's commands. Every target stands in a virtual environment of its own; `make install` builds it once.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# More processes than cores: tests on real processes mostly wait. Rewritten modules are kept, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=auto --dist=loadgroup
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The first interpreter that runs and is new enough; `make PYTHON=/path/to/python` overrides.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$each -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$each; break; }; done)

.PHONY: install swarm lint check test sim chaos chaos-table soak docker-test gpu-test bench bench-peers dist clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Starling needs Python 3.11 or later: none was found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[dev]'
	@touch $@

# Four real peers on this machine learn together, before one's eyes: five minutes on two cores.
swarm: install
	$(BIN)/python -m node swarm --peers 4 --rounds 14

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All tests are collected once before they are divided: what pytest makes of their modules is there for all processes then.
# What fails here fails again in the tests, where it is shown.
.PHONY: collected ready
collected: install
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only --quiet > /dev/null || true
ready: install
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint collected

# Everything that needs no real processes or sockets: minutes.
check: ready
	$(PYTEST) -m "not real"

# The same and the tests on real processes and sockets, in one run.
test: ready
	$(PYTEST)

# Many seeds of every fault, every crash point, the vote by itself, and a large swarm; then the long tests, of which
# `make test` plays a sample: half an hour on two cores. The parts run two at a time, the longest first.
SIM_CRASHES := $(addprefix sim-at-every-message-,crash silence one-way stall)
SIM_OVERLAPS := $(addprefix sim-overlap-at-every-message-,crash silence one-way stall)
SIM_PAUSES := $(addprefix sim-pauses-,butterfly push_sum data_parallel ring parameter_server parameter_server_async)
SIM_PARTS := $(SIM_CRASHES) sim-pairs-of-crashes sim-calm sim-large sim-sixteen sim-clusters $(SIM_OVERLAPS) sim-overlap \
	sim-breaking sim-leaving sim-votes sim-stages sim-chains sim-closing sim-gossip sim-crash-push_sum sim-crash-gossip \
	sim-moshpit $(SIM_PAUSES) sim-pauses-stages
.PHONY: sim-all $(SIM_PARTS)

sim: install
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target sim-all
	$(PYTEST) --long -m long

sim-all: $(SIM_PARTS)

$(filter-out %-crash,$(SIM_CRASHES)): SAMPLE := --sample 250
$(SIM_CRASHES): sim-at-every-message-%:
	$(BIN)/python -m tests.sim.crashes --peers 4 --kind $* $(SAMPLE)
$(filter-out %-crash,$(SIM_OVERLAPS)): SAMPLE := --sample 100
$(SIM_OVERLAPS): sim-overlap-at-every-message-%:
	$(BIN)/python -m tests.sim.crashes --peers 3 --kind $* --overlap --fragments 4 $(SAMPLE)
sim-overlap:
	$(BIN)/python -m tests.sim --peers 3 --rounds 6 --seeds 0:3 --faults all --overlap
	$(BIN)/python -m tests.sim --peers 3 --rounds 6 --seeds 3:6 --faults all --overlap --fragments 4
	$(BIN)/python -m tests.sim --peers 3 --rounds 6 --seeds 1010 --faults crash --overlap --fragments 4 --json
sim-pairs-of-crashes:
	$(BIN)/python -m tests.sim.crashes --peers 5 --kind crash --pairs --sample 300
sim-calm:
	$(BIN)/python -m tests.sim --peers 5 --rounds 6 --seeds 0:25 --faults calm
sim-large:
	$(BIN)/python -m tests.sim --peers 32 --rounds 50 --seeds 0 --json
sim-sixteen:
	$(BIN)/python -m tests.sim --peers 16 --rounds 4 --seeds 0:4 --faults calm
sim-clusters:
	$(BIN)/python -m tests.sim --peers 9 --voters 3 --clusters --rounds 4 --seeds 10:12 --faults breaking
	$(BIN)/python -m tests.sim --peers 9 --voters 3 --clusters --rounds 4 --seeds 102 --faults pausing
	$(BIN)/python -m tests.sim --peers 9 --voters 3 --clusters --inner-steps 10 --seeds 209 --faults mixed
	$(BIN)/python -m tests.sim --peers 9 --voters 3 --clusters --rounds 8 --seeds 260 --faults partition
	$(BIN)/python -m tests.sim --peers 36 --voters 6 --clusters --rounds 4 --seeds 0 --faults lies --json
sim-breaking:
	$(BIN)/python -m tests.sim --peers 5 --rounds 4 --seeds 0:12 --faults breaking
sim-leaving:
	$(BIN)/python -m tests.sim.leaving --peers 3 --every 4
sim-votes:
	$(BIN)/python -m tests.sim.scheduling --seeds 0:20000
sim-stages:
	$(BIN)/python -m tests.sim --stages 3 --peers 6 --rounds 4 --seeds 0:6 --faults calm
sim-chains:
	$(BIN)/python -m tests.sim --stages 3 --peers 6 --rounds 4 --seeds 0:2 --faults chains --chains
	$(BIN)/python -m tests.sim.crashes --stages 3 --peers 6 --chains --sample 15
sim-closing:
	$(BIN)/python -m tests.sim.closing --rounds 4,14 --seeds 0:2
sim-gossip:
	$(BIN)/python -m tests.sim --protocol gossip --peers 4 --rounds 5 --seeds 0:4 --faults breaking
sim-crash-push_sum sim-crash-gossip: sim-crash-%:
	$(BIN)/python -m tests.sim.crashes --protocol $* --peers 3 --end --sample 100
sim-moshpit:
	$(BIN)/python -m tests.sim --protocol moshpit --peers 4 --rounds 5 --seeds 0:5 --faults breaking
	$(BIN)/python -m tests.sim --protocol moshpit --directory --peers 6 --rounds 5 --seeds 0:8 --faults directory
# Three seeds of each protocol, and those that once failed.
$(SIM_PAUSES): SIZE := --peers 4 --rounds 5
sim-pauses-butterfly: SIZE := --peers 5 --rounds 6
sim-pauses-butterfly: FAILED := 770048
sim-pauses-ring: FAILED := 45
sim-pauses-parameter_server: FAILED := 157
sim-pauses-parameter_server_async: FAILED := 73
$(SIM_PAUSES): sim-pauses-%:
	for seeds in 0:3 $(FAILED); do \
		$(BIN)/python -m tests.sim --protocol $* $(SIZE) --seeds $$seeds --faults pausing --json || exit 1; done
sim-pauses-stages:
	$(BIN)/python -m tests.sim --stages 2 --peers 4 --rounds 4 --seeds 0:3 --faults pausing
	$(BIN)/python -m tests.sim --stages 3 --peers 6 --rounds 4 --seeds 5007 --faults pausing

# Real peers under a nemesis, every scenario once: half an hour. With root, iproute2, iptables and nsenter, on a network.
chaos: install
	$(BIN)/python -m tests.faults --scenario matrix

# The same with ten seeds, and with every point of a round for the kills: hours; what was played is not played again.
chaos-table: install
	$(BIN)/python -m tests.faults.table

# Half an hour in which something is done to somebody every fifteen seconds.
soak: install
	$(BIN)/python -m tests.faults.soak

# The image is built, and the swarm of docker/compose.yaml started, struck and judged: a quarter of an hour. With root
# and Docker; exit code 77 where that is not to be had. BASE and PIP_ARGS are the image's build arguments.
docker-test: install
	$(BIN)/python -m tests.docker $(if $(BASE),--base "$(BASE)") $(if $(filter undefined,$(origin PIP_ARGS)),,--pip-args="$(PIP_ARGS)")

# What only a GPU shows, in at most ten minutes; nothing is installed for it, and the tests of what is not there are left
# out. Exit code 2 where there is no GPU: nothing was tested. DEVICE=cpu runs the same tests on the CPU.
DEVICE := cuda
gpu-test:
	@$(or $(if $(findstring command,$(origin PYTHON)),$(PYTHON)),$(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu --device $(DEVICE) $(ARGS)

# The figures in benchmarks/RESULTS.md. An hour on two cores; what was done before is not done again. The long
# runs of the laboratory take hours more: only what is done is shown (without --show, they go on).
bench: install
	mkdir -p build
	$(BIN)/python -m benchmarks.averaging --peers 4 --megabytes 100 --codec fp32 --rounds 3
	$(BIN)/python -m benchmarks.averaging --peers 4 --megabytes 100 --codec int8 --rounds 3
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.neighbour
	$(BIN)/python -m benchmarks.killing --megabytes 100 --trials 5
	$(BIN)/python -m benchmarks.killing --megabytes 100 --trials 1 --stop
	$(BIN)/python -m benchmarks.lasting join
	$(BIN)/python -m benchmarks.lasting level
	$(BIN)/python -m benchmarks.swarms --seeds 0:5 --json build/swarms.json
	$(BIN)/python -m benchmarks.laboratory --show

# Other systems, floors and ours, averaging side by side: ten minutes. `make bench-peers ARGS=--all` plays each size of
# the table: hours. The others are installed here, and nowhere else.
bench-peers: $(VENV)/peers
	$(BIN)/python -m benchmarks.peers $(ARGS)

$(VENV)/peers: $(STAMP)
	$(PIP) --editable '.[peers]'
	@touch $@

# The wheel and the source archive of this commit; the wheel is built from the archive, without a network (docs/release.md).
DIST := dist
dist: install
	rm -f $(DIST)/starling_node-*
	@$(MAKE) --no-print-directory dist-files

.PHONY: dist-files
dist-files:
	$(BIN)/python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' $(DIST) > /dev/null
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir $(DIST) $(DIST)/starling_node-*.tar.gz
	@ls $(DIST)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
