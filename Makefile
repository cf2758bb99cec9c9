# make demo | test | docs | integration | distributed | bench | lint | cuda | format | clean
# Each target first sets up its own virtual environment; a second run finds it ready and starts at once.
#   PYTHON=python3.12     the interpreter to build it from (default: python3.11, else python3; 3.10 or newer)
#   TORCH="torch==2.10.0" another torch release (default: the one this tree is tested with)
#   ARGS="-k guard -x"    handed on to the command behind the target

VENV      ?= .venv
VENV_CUDA ?= .venv-cuda
TORCH     ?= torch==2.13.0
TORCH_CUDA ?= torch>=2.14
ARGS      ?=
PYTHON    ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)

PY  := $(VENV)/bin/python
# Two workers, whose threads wait without burning what the other needs.
TWO := OMP_WAIT_POLICY=passive
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# What the compiled engine is made from; an edit here makes the next target rebuild it.
BUILD_INPUTS := pyproject.toml $(wildcard setup.py) $(wildcard csrc/*)
CPP_FILES = $(shell find csrc tests/cpp -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

.PHONY: demo test docs integration distributed bench lint format cuda clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.ready-demo
	@$(PY) -m nanscan demo $(ARGS)

test: lint
	$(TWO) $(PY) -m pytest -n 2 --dist loadfile --max-worker-restart 1 $(ARGS)

# The site, from docs/ and the docstrings; what leads nowhere fails it.
docs: $(VENV)/.ready-dev
	@rm -rf build/docs/_modules  # Sphinx leaves the places of names in unchanged modules out of them
	$(PY) -m sphinx -b html -d build/docs/.doctrees -W --keep-going -q $(ARGS) docs build/docs
	@echo "the site: file://$(abspath build/docs/index.html)"

# Two parts of `make test` by themselves: other people's trainers and frameworks; several processes.
integration: $(VENV)/.ready-dev
	$(PY) -m pytest tests/integrations nanscan/integrations $(ARGS)

distributed: $(VENV)/.ready-dev
	$(PY) -m pytest tests/distributed $(ARGS)

bench: $(VENV)/.ready-dev
	$(PY) -m benchmarks $(ARGS)

lint: $(VENV)/.ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES))
	$(PY) -m mypy --strict nanscan

format: $(VENV)/.ready-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

cuda: $(VENV)/.toolkit $(VENV_CUDA)/.ready
	$(PY) tools/check_cuda.py --torch-python $(abspath $(VENV_CUDA))/bin/python $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_CUDA) build dist *.egg-info nanscan/*.so

# ---- environments ----------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 found on PATH: install one, or run make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) --version) (once)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing $(TORCH) (once)"
	@$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.torch $(BUILD_INPUTS)
	@echo "building nanscan and installing what the demo needs"
	@NANSCAN_CUDA=$${NANSCAN_CUDA:-$$($(PY) -c 'import torch; print("auto" if torch.version.cuda else 0)' 2>/dev/null)} \
		$(PIP) install -e ".[demo]"  # beside a CPU build of torch, compiling the CUDA engine would be a minute for nothing
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-demo requirements-dev.txt
	@echo "installing what the tests need"
	@$(PIP) install -r requirements-dev.txt
	@touch $@

# nvcc from pip where neither CUDA_HOME nor PATH has one.
$(VENV)/.toolkit: $(VENV)/.ready-dev
	@$(PY) -c 'import sys; from nanscan.engine import toolchain; sys.exit(not toolchain.find_cuda())' \
		|| { echo "no CUDA toolkit found: installing nvcc from pip"; $(PIP) install -e ".[cuda13]"; }
	@touch $@

# A CUDA build of torch beside the source tree: no GPU is needed, several GB of disk are.
$(VENV_CUDA)/.ready: $(VENV)/.made
	@echo "making $(VENV_CUDA) with a CUDA build of torch (once, several GB)"
	@$(PYTHON) -m venv $(VENV_CUDA)
	@$(VENV_CUDA)/bin/python -m pip --disable-pip-version-check --quiet install "$(TORCH_CUDA)" \
		numpy filelock click rich xxhash ninja pybind11
	@touch $@
