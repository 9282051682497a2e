from __future__ import annotations

import pytest

from nvfp4_train.config.load import compose_config
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import ConfigError

TWO = "data.corpora={web:/data/web,code:/data/code}"


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        validate(compose_config(["+experiment=quickstart", *words]))
    return str(error.value)


def test_corpora_and_mixtures_are_given_on_the_command_line():
    mixture = "data.mixture=[{weights:{web:70,code:30}},{weights:{code:1,web:0},start:0.9}]"
    for corpora in (TWO, "data.corpora.web=/data/web", "+data.corpora.web=/data/web"):
        cfg = compose_config(["+experiment=quickstart", corpora, "data.corpora.code=/data/code", mixture])
        validate(cfg)
        assert cfg.data.corpora == {"web": "/data/web", "code": "/data/code"}
        assert [(phase.start, phase.weights) for phase in cfg.data.mixture] == [
            (0.0, {"web": 70.0, "code": 30.0}),
            (0.9, {"code": 1.0, "web": 0.0}),
        ]


def test_the_published_blend_in_three_phases_is_an_option():
    cfg = compose_config(["+experiment=12b_hybrid", "data=three_phases"])
    validate(cfg)
    assert [phase.start for phase in cfg.data.mixture] == [0.0, 0.7, 0.9]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([TWO], "data.mixture=[{weights:{web:1,code:1}}]"),
        (["data.mixture=[{weights:{web:1}}]"], "weights of web, but data.corpora is empty"),
        ([TWO, "data.mixture=[{weights:{wbe:1}}]"], "weights of wbe, but data.corpora has web, code"),
        ([TWO, "data.mixture=[{weights:{web:0,code:0}}]"], "not all 0"),
        ([TWO, "data.mixture=[{weights:{web:-1,code:2}}]"], "must be 0 or positive"),
        ([TWO, "data.mixture=[{weights:{web:nan,code:2}}]"], "must be 0 or positive"),
        ([TWO, "data.mixture=[{weights:{web:1e-12,code:2}}]"], "at least 1e-9 of all"),
        ([TWO, "data.mixture=[{weights:{web:1},start:0.1}]"], "must begin with 0"),
        ([TWO, "data.mixture=[{weights:{web:1}},{weights:{code:1}}]"], "increase"),
        ([TWO, "data.mixture=[{weights:{web:lots}}]"], "weights.web"),
        (["data.corpora={a/b:/data}", "data.mixture=[{weights:{a/b:1}}]"], "without '/'"),
        (
            ["data.corpora={heldout:/data,web:/web}", "data.mixture=[{weights:{web:1}}]"],
            "call it something else",
        ),
        (["data.packing=windows"], "choose stream, documents"),
        (["data.workers=-1"], "data.workers=-1 must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(words, says):
    assert says in refused(*words)
