"""Makes model directories: tokenizer, masked-token pretraining, sentence objectives, classifiers, evaluation."""
