"""Verdicts of the math verifier on answers that were judged by hand, without its processes."""

import logging
from collections.abc import Iterator

import pytest

from rollgrad.adapters.rewards.math_worker import answered, grade

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
RIGHT = {
    "7": r"""7 ; The answer is 7. ; Answer:7 ; **Answer:** 7 ; #### 7 ; 7.0 ; \boxed{7} ; $\boxed{7}$ ; \boxed{7.}
        \boxed{+7} ; \boxed{07} ; \boxed{\text{7}} ; \boxed{\mathbf{7}} ; \fbox{7} ; \boxed{\boxed{7}}
        \boxed{x=7} ; $x = 7$ ; \[x = 7\] ; \(x = 7\) ; 3 + 4 = 7 ; \boxed{3+4=7} ; \boxed{7} So 8.
        First \boxed{3}, then \boxed{7} ; \boxed{3}, thus $\boxed{7}$.
        The final answer is $7$. I hope it is correct. ; <answer>7</answer> ; <answer>\boxed{7}</answer> or 8 ; $7
        \boxed{\$7} ; \boxed{7 \text{ cm}} ; \boxed{7\,\mathrm{cm}^2} ; 7 cm ; The answer is 7 apples.
        \boxed{7^\circ} ; 7% ; \boxed{f(2)=7} ; The answer is 7, since 3 + 4 = 7. ; \framebox{7} ; \boxed{7~\text{cm}}
        \boxed{\text{Answer: }7} ; The answer is not 8. It is 7 ; The answer is not $8$. It is $7$. ; not 8 but 7
        The answer is 7, not 8. ; It isn't 8; it is 7. ; 7 rather than 8""",
    "33": r"""15 + 18 = 33 ; \boxed{18 + 15 = 33} ; $= 33$ ; \boxed{\approx 33} ; 33 = 18 + 15 ; $33 = 18+15$
        \boxed{33 = 18 + 15} ; The sum is 33 = 18 + 15. ; 33 = 66/2 ; $33 = 3 \times 11$ ; \boxed{33_{10}}
        \boxed{33_{\text{ten}}}""",
    "-5": r"""-5 ; \boxed{-5}""",
    "1234": r"""1,234 ; \boxed{1,234} ; \boxed{1{,}234} ; \boxed{1\,234} ; \boxed{1,\!234} ; \boxed{1\!\,234}
        1234.0""",
    "1,234": r"""1234 ; \boxed{1234}""",
    "1500": r"""1.5e3 ; $1.5e3$ ; \boxed{1.5 \times 10^3} ; \boxed{1.5 \cdot 10^{3}} ; 1,500""",
    "1000": r"""\boxed{10^3} ; 1e3""",
    "2^{10}": r"""1024 ; \boxed{2^{10}} ; \boxed{4^5}""",
    "2+3": r"""5 ; \boxed{3+2}""",
    r"\$5": r"""5 ; $5 ; It costs $5.00. ; \boxed{\$5}""",
    "$5": r"""5 ; $5""",
    "18": r"""He makes $18 every day""",
    r"5 \text{ cm}": r"""5 ; \boxed{5\text{ cm}}""",
    r"90^\circ": r"""\boxed{90°} ; \boxed{90\degree} ; 90 ; \boxed{90^{\circ}} ; 90 degrees""",
    "1/2": r"""0.5 ; 1/2 ; \boxed{\frac12} ; \boxed{\dfrac{1}{2}} ; \boxed{\frac{2}{4}} ; .5 ; \boxed{50\%}
        \boxed{1:2}""",
    r"\frac{3}{4}": r"""The probability is 3/4. ; 3/4 of it""",
    r"33\frac{1}{3}\%": r"""\boxed{33\frac{1}{3}\%} ; \boxed{33.\overline{3}\%} ; \boxed{\frac13}
        \boxed{33\frac13}""",
    r"\$18.90": r"""The cost is \$18.90. ; 18.9""",
    r"\frac{3}{2}": r"""1.5 ; 1 1/2 ; \boxed{1\frac{1}{2}} ; \boxed{1 \frac{1}{2}} ; 3/2""",
    r"-\frac{1}{2}": r"""-0.5 ; -1/2 ; \boxed{\frac{-1}{2}} ; \boxed{\frac{1}{-2}}""",
    r"\frac13": r"""\boxed{0.33333333} ; \boxed{0.\overline{3}} ; \boxed{1/3}""",
    r"0.\overline{12}": r"""\boxed{\frac{4}{33}} ; \boxed{0.\overline{12}}""",
    "50": r"""50% ; \boxed{50\%} ; 50 percent""",
    r"50\%": r"""0.5 ; 50 ; \boxed{50\%}""",
    r"1+\sqrt{2}": r"""\boxed{\sqrt{2}+1} ; \boxed{2.414213562}""",
    r"\sqrt{12}": r"""\boxed{2\sqrt{3}} ; \boxed{\sqrt{12}} ; \boxed{2√3} ; \boxed{\sqrt12} ; \boxed{sqrt(12)}""",
    r"\pi": r"""\boxed{3.14159265358979} ; $\pi$""",
    r"2\pi": r"""\boxed{2*pi} ; \boxed{2π}""",
    r"\emptyset": r"""\boxed{\varnothing} ; \boxed{\emptyset}""",
    r"\frac12 \pi": r"""\boxed{\frac{\pi}{2}} ; \boxed{\pi/2}""",
    "3+4i": r"""\boxed{3+4i} ; \boxed{4i+3}""",
    "(x+1)^2": r"""\boxed{x^2+2x+1} ; $(1+x)^2$""",
    "x=5": r"""5 ; \boxed{x=5}""",
    "y=2x+1": r"""\boxed{2x+1=y} ; \boxed{2x-y+1=0} ; \boxed{y=1+2x}""",
    "(1,2)": r"""\boxed{(1,2)} ; \boxed{1 < x < 2} ; \boxed{x \in (1,2)}""",
    "(1,2]": r"""\boxed{(1,2]}""",
    r"(-\infty,2)": r"""\boxed{(-\infty, 2)} ; \boxed{x<2}""",
    r"(-\infty,1)\cup(2,\infty)": r"""\boxed{(-\infty,1)\cup(2,\infty)} ; \boxed{x<1 \text{ or } x > 2}
        \boxed{x<1 \cup x>2}""",
    r"(-\infty,1]\cup[2,\infty)": r"""\boxed{x \leq 1 \text{ or } x \ge 2}""",
    r"x<1 \text{ or } x>2": r"""\boxed{x<1 \text{ or } x>2} ; \boxed{(-\infty,1)\cup(2,\infty)}
        \boxed{x>2 \text{ or } x<1} ; So it is $x<1 \text{ or } x>2$.""",
    r"(-\infty,\infty)": r"""\boxed{\mathbb{R}}""",
    r"[2,5)": r"""\boxed{\{x: 2 \le x < 5\}} ; \boxed{\{x \mid 2 \le x < 5\}}""",
    r"\{3,2,1\}": r"""\boxed{\{1,2,3\}} ; \boxed{1,2,3} ; $1$, $2$ and $3$""",
    "1,2": r"""\boxed{1 \text{ and } 2} ; $1$ and $2$ ; \boxed{1} and \boxed{2} ; $\boxed{1}$, $\boxed{2}$""",
    r"\pm 2": r"""\boxed{\pm 2} ; \boxed{-2, 2} ; \boxed{x=\pm 2}""",
    "(3,4)": r"""\boxed{(3,4)} ; \boxed{\left(3, 4\right)}""",
    MATRIX: r"""\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}} ; \boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}""",
    r"\text{Monday}": r"""\boxed{Monday} ; \boxed{\text{Monday}}""",
    "A": r"""\boxed{A} ; \boxed{\text{(A)}} ; \boxed{\textbf{(A)}} ; A ; (A) ; **A** ; The answer is A. ; Answer: (A)
        The correct option is **A**. ; \boxed{A.} ; \boxed{\textbf{(A)}\ 33} ; The answer is A: 42. ; Answer: (A) 42
        The answer is A because of B. ; B and C fail. The answer is (A). ; <answer>A</answer>""",
    r"\text{(C)}": r"""\boxed{C} ; C. ; **Final answer:** C""",
    r"\text{Friday}": r"""Friday ; The answer is Friday. ; \boxed{friday}""",
    "1010_2": r"""\boxed{1010_2} ; \boxed{1010_{2}} ; 1010""",
    "3:4": r"""\boxed{3:4} ; \boxed{\frac{3}{4}} ; \boxed{6:8}""",
}
WRONG = {
    "7": r"""8 ; no idea ; \boxed{} ; \boxed{8} The number 7 ; First \boxed{7}, then \boxed{3}
        7 is not it. The answer is 8. ; \boxed{7} or \boxed{8} ; \boxed{7 \text{ or } 8} ; $7$ or $8$
        \boxed{7,8} ; \boxed{6}, \boxed{7} ; $6$, $7$, $8$ ; -7 ; 7.1 ; The final answer is 7, \boxed{8}
        The answer is not 7. It is 8 ; The answer is not 7. ; It is 8, not 7. ; 8 instead of 7 ; The answer isn't $7$.
        <answer>8</answer> 7 ; <answer></answer> 7 ; \boxed{7 ; 7e2 ; \boxed{\pm 7} ; 7 1/2""",
    # Repetitions of the question, which a model under training would soon find.
    "33": r"""18 + 15 ; $18 + 15$ ; \boxed{18 + 15} ; \boxed{18+15} ; 18+15 ; The sum 18 + 15 is ; \boxed{18 15}
        $18 15$ ; 18 15 ; \boxed{3 \cdot 11} ; 3 * 11 ; 66/2 ; 66 / 2 ; \boxed{\frac{66}{2}} ; $66 \div 2$
        (66)/2 ; \boxed{\sqrt{1089}} ; 40 - 7 ; \boxed{33 \times 1} ; \boxed{2^5+1} ; \boxed{x = 18 + 15}
        34 = 18 + 15 ; \boxed{34 = 18 + 15} ; 17 = 33 - 16 ; \boxed{33_8} ; \boxed{33\frac13} ; \boxed{33\frac{1}{3}\%}
        $\gcd(33,66)$ ; \boxed{|-33|} ; \boxed{\max(33, 2)}""",
    "1024": r"""\boxed{2^{10}} ; \boxed{10^3+24}""",
    "120": r"""\boxed{5!} ; $5!$""",
    "10": r"""\boxed{\binom{5}{2}}""",
    "1": r"""\boxed{\sin^2 x+\cos^2 x} ; 1 1/2""",
    "0": r"""\boxed{0.\overline{3}} ; $x - x$""",
    "-1": r"""\boxed{e^{i\pi}}""",
    "3.5": r"""3 + 1/2 ; \boxed{7 \cdot 0.5}""",
    r"\frac{1}{2}": r"""1/4 + 1/4 ; \boxed{1-\frac{1}{2}} ; \boxed{\frac13} ; \boxed{\frac{\sqrt{1}}{2}}
        \boxed{\frac{1}{2} \cdot \frac{2}{2}}""",
    "x=5": r"""\boxed{x=2+3} ; \boxed{y=5}""",
    r"\{1,2\}": r"""\boxed{\{1,1+1\}} ; \boxed{1} ; \boxed{1,2,3}""",
    r"\begin{pmatrix}2\\3\end{pmatrix}": r"""\boxed{\begin{pmatrix}1+1\\3\end{pmatrix}}""",
    "12": r"""It is 1,2""",
    "1.5": r"""1.5e3""",
    "-5": r"""5 ; \boxed{5}""",
    "5": r"""-5 ; \boxed{-5} ; \boxed{\pm 5}""",
    "50": r"""\boxed{5\%}""",
    r"\frac13": r"""\boxed{0.333}""",
    r"\pi": r"""\boxed{3.14}""",
    r"1+\sqrt{2}": r"""\boxed{2.41}""",
    "(1,2)": r"""\boxed{[1,2]} ; \boxed{(2,1)}""",
    "(3,4)": r"""\boxed{(4,3)}""",
    "(1,2]": r"""\boxed{[1,2)}""",
    MATRIX: r"""\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}""",
    "x^3": r"""\boxed{x^2}""",
    "3+4i": r"""\boxed{3-4i}""",
    "y=2x+1": r"""\boxed{y=2x+2}""",
    r"\text{Monday}": r"""\boxed{\text{Tuesday}}""",
    r"\text{east}": r"""\boxed{\text{seat}}""",
    "A": r"""\boxed{B} ; B ; \boxed{AB} ; \boxed{A, B} ; \boxed{A or B} ; A: no. B: yes. ; The answer is A bird.
        The answer is A. But wait, the answer is B. ; It is B, not A. ; Option A is wrong; the answer is C.""",
    r"\text{Friday}": r"""The answer is not Friday. ; Monday or Friday ; \boxed{\text{Friday and Monday}}""",
    "1010_2": r"""\boxed{1010_3} ; \boxed{1011_2}""",
    r"33\frac{1}{3}\%": r"""\boxed{33} ; \boxed{33\%}""",
    r"(-\infty,1]\cup[2,\infty)": r"""\boxed{x < 1 \text{ or } x \ge 2} ; \boxed{x \le 2 \text{ or } x \ge 1}""",
    r"(-\infty,\infty)": r"""\boxed{(0,\infty)} ; \boxed{\mathbb{Z}}""",
}


@pytest.fixture(autouse=True, scope="module")
def no_warnings() -> Iterator[None]:
    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that nobody keeps a deadline
    yield
    logger.setLevel(level)


def misjudged(table: dict[str, str], value: float) -> list[tuple[str, str]]:
    """Gets the answers of a table that have another verdict; answers are on lines of their own, or between " ; "."""
    told = [(label, reply.strip()) for label in table for reply in table[label].replace("\n", " ; ").split(" ; ")]
    return [(label, reply) for label, reply in told if grade(label, reply) != value]


def test_right_answers_are_right() -> None:
    assert misjudged(RIGHT, 1.0) == []


def test_the_sign_of_typographers_is_a_minus() -> None:
    replies = ("\N{MINUS SIGN}5", "$\N{MINUS SIGN}5$", "\\boxed{\N{MINUS SIGN}5}")
    assert [(grade("-5", reply), grade("5", reply)) for reply in replies] == [(1.0, 0.0)] * 3


def test_wrong_answers_and_repetitions_of_the_question_are_wrong() -> None:
    assert misjudged(WRONG, 0.0) == []


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("7", "7"),
        ("<answer>8</answer> or <answer>7</answer>, or 9", "7"),
        ("<answer>7", "<answer>7"),
        ("7</answer>", "7</answer>"),
        ("</answer><answer>7", "</answer><answer>7"),
    ],
)
def test_a_reply_with_answer_tags_answers_within_the_last_ones(reply: str, answer: str) -> None:
    assert answered(reply) == answer
