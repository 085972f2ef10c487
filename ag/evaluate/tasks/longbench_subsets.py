"""The English subsets of LongBench: prompt, longest answer and metric of each, as the benchmark defines them.

From https://github.com/THUDM/LongBench (MIT): the wording, its slips included, is what makes numbers comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ag.evaluate.tasks.longbench_metrics import classification, code_similarity, count, f1, retrieval, rouge_l


@dataclass(frozen=True)
class Subset:
    """A subset of the benchmark."""

    prompt: str  # with places for ``{context}`` and ``{input}``
    most: int  # tokens that an answer may have
    metric: Callable[[str, str, Sequence[str]], float]  # of one answer, one reference and the possible classes
    first_line: bool = False  # only the first line of an answer counts
    chat: bool = True  # a chat template may go around the prompt


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given "
    "passages. Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)

SUBSETS = {
    "narrativeqa": Subset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        "question asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely as "
        "you can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion: "
        "{input}\n\nAnswer:",
        128,
        f1,
    ),
    "qasper": Subset(
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase or sentence if possible. If the question cannot be answered based on the "
        'information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n '
        "Answer the question based on the above article as concisely as you can, using a single phrase or "
        "sentence if possible. If the question cannot be answered based on the information in the article, "
        'write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
        128,
        f1,
    ),
    "multifieldqa_en": Subset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question "
        "based on the above text, only give me the answer and do not output any other words.\n\nQuestion: "
        "{input}\nAnswer:",
        64,
        f1,
    ),
    "hotpotqa": Subset(_PASSAGES, 32, f1),
    "2wikimqa": Subset(_PASSAGES, 32, f1),
    "musique": Subset(_PASSAGES, 32, f1),
    "gov_report": Subset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        rouge_l,
    ),
    "qmsum": Subset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the "
        "above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        rouge_l,
    ),
    "multi_news": Subset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "trec": Subset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        classification,
        first_line=True,
        chat=False,
    ),
    "triviaqa": Subset(
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        f1,
        first_line=True,
        chat=False,
    ),
    "samsum": Subset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        rouge_l,
        first_line=True,
        chat=False,
    ),
    "passage_count": Subset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format "
        "should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        count,
    ),
    "passage_retrieval_en": Subset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph "
        "the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter "
        'the number of the paragraph that the abstract is from. The answer format must be like "Paragraph '
        '1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        retrieval,
    ),
    "lcc": Subset(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, code_similarity, chat=False
    ),
    "repobench-p": Subset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, code_similarity, chat=False
    ),
}
