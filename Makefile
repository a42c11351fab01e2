# make demo: the main job, end to end.     make test: the tests.     make lint: style and types.
# Each makes its own virtual environment under .venv/ once, and again when pyproject.toml changes.
#
# PYTHON=python3.12 make test    another interpreter         TORCH=2.12.0 make test    another torch
# make test PYTEST_ARGS="-k tree --nightly"                  make demo DEMO_ARGS="--out build/demo"

PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: demo test lint bench clean

demo: .venv/demo/ready
	.venv/demo/bin/python -m demo $(DEMO_ARGS)

test: .venv/test/ready
	OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

lint: .venv/test/ready
	.venv/test/bin/ruff check .
	.venv/test/bin/ruff format --check .
	.venv/test/bin/mypy

bench: .venv/demo/ready
	.venv/demo/bin/python -m bench $(BENCH_ARGS)

.venv/demo/ready: EXTRAS = demo,bench
.venv/test/ready: EXTRAS = test,lint
.venv/%/ready: pyproject.toml scripts/venv.sh
	rm -rf $(@D)
	scripts/venv.sh $(@D) $(EXTRAS)
	touch $@

clean:
	rm -rf .venv build *.egg-info
