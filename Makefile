# Two commands for a fresh machine: `make run` and `make test`. Both install what is missing first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
# Processes among which the tests are shared out, one more than cores: many tests wait for others.
JOBS ?= 3
CLUSTER ?=
IMAGES := data/textures

.PHONY: help run test test-all test-mpi test-slurm test-browser test-faults check lint docs results figures bench clean

help:  ## show this text
	@echo "make VERB [PYTHON=python3] [ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

# The stamp makes the second time quick; a change of the dependencies installs again.
$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	sh scripts/install.sh "$(PYTHON)" "$(VENV)" dev
	@touch $@

run: $(INSTALLED)  ## write a small folder of images, train on it and print the tables
	$(BIN)/hires data make $(IMAGES) --classes 4 --count 64 --size 256x256 --seed 0
	$(BIN)/hires run campaign=quickstart data=folder data.path=$(IMAGES) model=resnet18 image=256 \
	    parallel=sp+gems precision=bf16 batch=8 steps=12 $(ARGS)

test: $(INSTALLED)  ## run the tests that guard a promise, JOBS=3 at a time
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(INSTALLED)  ## run what `make test` runs, and what searches longer: random programs, compilers, choices of layouts
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not mpi and not gpu and not slurm and not browser" $(ARGS)

test-mpi: $(INSTALLED)  ## run the tests that need an MPI; as root it installs Debian's Open MPI and MPICH first
	bash scripts/install_mpi.sh $(BIN)/python
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m mpi $$(grep -rl --include='*.py' 'mark\.mpi' tests) $(ARGS)

test-slurm: $(INSTALLED)  ## as root: start a Slurm, test on it, stop it; CLUSTER=--accounting adds slurmdbd
	bash scripts/test_slurm.sh $(BIN)/python "$(CLUSTER)" $(ARGS)

test-browser: $(INSTALLED)  ## open the page of a report in a headless Chromium, which is installed if missing
	sh scripts/install_browser.sh
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

check: lint  ## run ruff, mypy and the fast tests
	$(BIN)/python -m pytest -m "not dist and not slow and not mpi and not gpu and not slurm and not browser" $(ARGS)

lint: $(INSTALLED)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-faults: $(INSTALLED)  ## show that the tests catch the faults of tests/faults; ARGS="plan" for one part
	$(BIN)/python tests/faults/run_faults.py $(ARGS)

docs: $(INSTALLED)  ## build the documentation into build/site
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

results: $(INSTALLED)  ## measure the table of results/README.md again: hours, nothing beside it
	sh scripts/results.sh $(BIN)/hires

figures: $(INSTALLED)  ## predict the published figures again, into build/figures: ten minutes
	$(BIN)/python results/figures/figures.py all --out build/figures

bench: $(INSTALLED)  ## measure layouts beside torch's own
	$(BIN)/hires bench layouts $(ARGS)

clean:  ## remove what was made here, results excepted
	rm -rf "$(VENV)" build dist ./*.egg-info $(IMAGES)
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
