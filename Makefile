# make demo: the main job, end to end.     make test: the tests.     make lint: style and types.
# make docs: the pages, in build/docs.     make wheel: build it and try it in a clean environment.
# make coverage: the tests with the lines that they run; fails below 90%.
# Each makes its own virtual environment under .venv/ once, and again when pyproject.toml changes.
#
# PYTHON=python3.12 make test    another interpreter         TORCH=2.12.0 make test    another torch
# make test PYTEST_ARGS="-k tree --nightly"                  make demo DEMO_ARGS="--out build/demo"

PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
export PYTHON

.PHONY: demo test coverage lint bench docs tables wheel clean

demo: .venv/demo/ready
	.venv/demo/bin/python -m demo $(DEMO_ARGS)

test: .venv/test/ready
	OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -n $(PYTEST_WORKERS) $(COVERAGE_ARGS) $(PYTEST_ARGS)

# Without the tests of how long something takes: it takes longer while lines are counted.
coverage: COVERAGE_ARGS = --cov --cov-report=term-missing:skip-covered \
	--ignore=tests/passes/test_time.py --timeout=1800
coverage: test

lint: .venv/test/ready
	.venv/test/bin/ruff check .
	.venv/test/bin/ruff format --check .
	.venv/test/bin/mypy

bench: .venv/demo/ready
	.venv/demo/bin/python -m bench $(BENCH_ARGS)

# The tables of the documentation, from what was measured.
tables:
	$(PYTHON) docs/tables.py

docs: .venv/docs/ready
	.venv/docs/bin/python -m sphinx --builder html --fail-on-warning --keep-going --quiet \
		--doctree-dir build/doctrees docs build/docs

wheel: .venv/build/ready
	rm -rf build/dist build/lib .venv/wheel
	.venv/build/bin/python -m build --outdir build/dist . >/dev/null
	scripts/venv.sh .venv/wheel "" build/dist/*.whl
	cd build/dist && ../../.venv/wheel/bin/python -I ../../scripts/smoke.py

.venv/demo/ready: EXTRAS = demo,bench
.venv/test/ready: EXTRAS = test,lint
.venv/docs/ready: EXTRAS = docs
.venv/%/ready: pyproject.toml scripts/venv.sh
	rm -rf $(@D)
	scripts/venv.sh $(@D) $(EXTRAS)
	touch $@

.venv/build/ready: Makefile
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check -qq install "build>=1.2"
	touch $@

clean:
	rm -rf .venv build *.egg-info
