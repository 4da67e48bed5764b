"""Our own fact corpora: restated leads and fact sentences, written by a model or by templates.

    leads -> prompts -> endpoint -> answers -> filters, near_duplicates -> corpus
    templates: facts and sentence patterns -> sentences, without a model

Nothing here ships data: a person brings the sources, and each text keeps its source's licence.
"""
