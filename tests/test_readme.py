"""README.md and the guides: each block runs as it stands, by itself, and prints what it says."""

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from support.readme import GUIDES, INDEX, PAGES, README, ROOT, blocks, headings, run

import ampopt
import ampopt_kernels

INTO_THE_REPOSITORY = re.compile(r"\]\(https://[^)]+/ampopt/ampopt/(?:blob/)?main/([^)]+)\)")
"""A link to a file of the repository by its address, as pyproject.toml has it."""

PRINTED = {
    "A loop": [],
    "Your own optimizer": [],
    "Tutorial: a float16 model in ten minutes": ["True", "accuracy above 0.9: True"],
    "Why losses are scaled": ["0.0 True"],
    "Less memory": ["3.06 bytes, and 4 of parameter and gradient"],
    "Checkpoints": ["torch.float32", "torch.int8"],
    "Adam: numbers that a step computes once": ["tensor(2.)", "[0.5000, 1.5000]"],
    "LARS: sums over a parameter": [],
    "Adafactor: rows and columns, and flags": [
        "[0.8000, 0.8000]",
        "[0.8000, 1.2000]",
        "['square'] torch.Size([2, 1])",
    ],
    "Langevin dynamics: random numbers": [],
    "A step that is not a rule": ["[0.9000, 1.0000, 1.0000]"],
    "Clipping, and looking at gradients": [],
    "Gradient accumulation": [],
    "A scale for each loss": ["65536.0 65536.0"],
    "Sums in float32 for half precision": ["tensor(259.)"],
    "Dropping a single bad micro-batch": [],
    "A whole loop": ["True"],
    "Master weights": [
        "{}: 1.00",
        "{'master_weights': True}: 0.99",
        "{'param_rounding': 'stochastic'}: 0.99",
    ],
    "Choosing dtypes": ["torch.float16 torch.float32"],
    "Operators, models and modules": [
        "torch.float32 torch.bfloat16",
        "torch.float32 torch.bfloat16",
    ],
    "A step as one call": ["65536.0"],
    "What a step does": [
        "SGD: 1 step. In the last one:",
        "  2 parameters (weight, bias): by the rule, on the compiled backend",
        "The host looked at no tensor, so on a GPU it would wait for nothing.",
    ],
    "A step of your own": ["False"],
    "Keeping a scaler": ["True", "False True"],
    "Several optimizers": ["True 32768.0", "False 32768.0"],
    "The loss scale of a checkpoint": ["131072.0"],
    "From torch.amp": ["16384.0 500"],
    "From Megatron": [],
    "Closures and replay": ["loss ['weight', 'bias']"],
    "Loss scales": ["262144.0"],
    "Third-party optimizers": ["True"],
    "Testing your optimizer": ["True"],
    "In every step": [
        "4 steps, 1 skipped, the last under a scale of 2^15.",
        "weight          1     3            4       0.0%",
        "{'overflow': 1, 'norm': 0, 'loss': 0} 2",
    ],
    "To skip more than overflows": ["{'overflow': 0, 'norm': 1, 'loss': 0}"],
    "To find the module": [
        "loss 6 2",
        "the output of '2' (Linear) is not finite: float16",
    ],
    "A second backward pass through the same graph": ["True"],
    "BatchNorm's running_mean is NaN, and so is every evaluation": ["tensor(True) tensor(True)"],
}
"""What the block under each heading prints, and says that it prints."""

ON_RANKS = {
    "The script": 2,
    "An average of a sharded model": 2,
    "Tensor parallelism": 4,
    "Pipelines": 2,
    "Micro-batches on many ranks": 2,
    "Groups of your own": 2,
    "Checkpoints on many ranks": 2,
}
"""Blocks that so many ranks run, each of which prints the scale after one skipped step."""

MIGRATIONS = [
    page
    for page in (README, ROOT / "examples" / "index.md", *GUIDES)
    if page.stem.startswith(("README", "index", "from_")) and "```diff" in page.read_text()
]
"""Pages with a difference of another system's script."""

IN_FRAMEWORKS = {
    "With Lightning",
    "With Accelerate and transformers",
    "Trainers of transformers and trl",
    "With verl",
}
"""Those that tests/frameworks runs, where the frameworks are installed."""


@pytest.mark.parametrize("heading", PRINTED)
def test_block(heading, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may leave files
    run(heading, tmp_path)
    printed = capsys.readouterr().out
    for line in PRINTED[heading]:
        assert line in printed
        assert line in blocks()[heading]


def printed_on_a_rank(heading, folder):
    own = Path(folder, str(torch.distributed.get_rank()))
    own.mkdir()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        warnings.catch_warnings(),
    ):
        patch.chdir(folder)  # where ranks may leave files together
        warnings.simplefilter("ignore")  # of what torch has deprecated in itself
        run(heading, own)
    return out.getvalue()


@pytest.mark.parametrize("heading", ON_RANKS)
def test_block_of_each_rank(heading, tmp_path, two_ranks, four_ranks):
    pool = two_ranks if ON_RANKS[heading] == 2 else four_ranks
    assert pool.run(printed_on_a_rank, heading, str(tmp_path)) == ["32768.0\n"] * pool.n


class Names(dict):
    """The names that a difference does not define; ``loss`` is computed when it is used."""

    def __init__(self):
        super().__init__(vars(ampopt))
        data = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
        model = self.Model(4, 2)
        optimizer = ampopt.SGD(model.parameters(), lr=0.1)
        self.update(model=model, network=model, optimizer=optimizer, OwnStep=ampopt.TrainStep)
        self.update(images=data[0], labels=data[1], loader=[data], batches=iter([data]), max_iter=1)
        self.update(scheduler=torch.optim.lr_scheduler.LinearLR(optimizer), increment=None)
        self.update(weight_decay=lambda _: None, clip_each=lambda _: None)
        self["scale"] = ampopt.DynamicLossScale()
        self["loss_fn"] = lambda first, *labels: (
            torch.nn.functional.cross_entropy(first, *labels) if labels else self["loss"]
        )

    class Model(torch.nn.Linear):
        """Takes inputs of any dtype, or a batch, of which it returns the loss."""

        def forward(self, input):
            if isinstance(input, tuple):
                return torch.nn.functional.cross_entropy(self(input[0]), input[1])
            return super().forward(input.to(self.weight.dtype)).float()

    def __missing__(self, name):
        if name != "loss":
            raise KeyError(name)
        return self["model"]((self["images"], self["labels"]))


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.stem)
def test_the_new_lines_of_a_difference_run(page):
    text = page.read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    new = [line[1:] for line in lines.splitlines() if line[:1] in " +" and line != " ..."]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler whose optimizer does not step here
        exec("\n".join(new), {}, Names())


def optimizer_of(heading, folder, weights, **defaults):
    """An optimizer of the rule that the block under ``heading`` defines without a class."""
    rule = run(heading, folder)["rule"]
    return type("Own", (ampopt.ElementwiseOptimizer,), {"rule": rule})([weights], defaults)


def test_the_rule_of_lars_steps_by_its_ratio_of_norms(tmp_path):
    weights = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    lars = optimizer_of("LARS: sums over a parameter", tmp_path, weights, lr=0.1, momentum=0.9)
    weights.grad = torch.tensor([0.0, 10.0]) * 1024
    lars.unscale_and_step(grads_scaled_by=1024.0)
    torch.testing.assert_close(weights.data, torch.tensor([3.0, 3.5]))


def test_the_rule_of_langevin_dynamics_samples(tmp_path):
    weights = torch.nn.Parameter(torch.zeros(1000))
    options = {"lr": 0.5, "temperature": 1.0, "seed": 0}
    langevin = optimizer_of("Langevin dynamics: random numbers", tmp_path, weights, **options)
    for _ in range(20):
        weights.grad = weights.detach().clone()  # of p * p / 2, so that samples are normal
        langevin.unscale_and_step(grads_scaled_by=1.0)
    assert f"{weights.std():.1f}" == "1.2"  # the longer the steps, the further from 1


def test_the_picture_has_the_figures_of_the_results():
    """Else run examples/site/draw_figures.py again."""
    drawn = runpy.run_path(str(ROOT / "examples" / "site" / "draw_figures.py"))
    assert str(drawn["figures"]()).encode() in drawn["PICTURE"].read_bytes()


def test_every_block_is_run():
    assert set(blocks()) == PRINTED.keys() | ON_RANKS.keys() | IN_FRAMEWORKS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        check_link(link, page)


@pytest.mark.parametrize("guide", [*GUIDES, INDEX], ids=lambda guide: guide.stem)
def test_links_of_a_guide_work_in_an_installed_package(guide):
    """The package contains the folder of guides alone: links to other files are addresses."""
    text = guide.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        assert "/" not in link, f"{link} is not in the package: link to its address"
    for link in INTO_THE_REPOSITORY.findall(text):
        check_link(link, README)


def check_link(link, page):
    """Fail unless the file and the heading exist that ``link``, relative to ``page``, leads to."""
    path, _, anchor = link.partition("#")
    target = in_package(page.parent / path) if path else page
    assert target.exists(), link
    assert not anchor or anchor in map(anchor_of, headings(target)), link


def in_package(path):
    """``path``, or the same file of the installed packages if their source is not here."""
    for folder, package in (("ampopt", ampopt), ("kernels/ampopt_kernels", ampopt_kernels)):
        if path.resolve().is_relative_to(ROOT / folder):
            return Path(str(package.__file__)).parent / path.resolve().relative_to(ROOT / folder)
    return path


def anchor_of(heading):
    """The anchor that GitHub makes of ``heading``."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_is_found_from_the_index(guide):
    assert f"]({guide.name})" in INDEX.read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
