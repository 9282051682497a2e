"""Models from and for other programs.

nemotron_h       Hugging Face's names and configuration of this model, both ways
tensor_files     safetensors files, read and written one tensor at a time
tokenizer_files  the tokenizer as transformers and SentencePiece read it
weights          where a model's weights come from: one of our checkpoints, or a Hugging Face folder
export           a folder for transformers, vLLM and others, in BF16/FP32 or NVFP4
"""
