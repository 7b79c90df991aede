# Fine-tunes GPT-2's released weights (downloaded once) on Shakespeare or --dataset=<your text>: 100 steps of 32
# sequences x 256 = 8,192 tokens. Architecture and tokenizer come from init_from, which can also be one of your
# checkpoints, or a Llama, Qwen3 or GPT-2 in Hugging Face format, in a folder or on the hub
# (owner/model):
#   python train.py config/finetune.py --init_from=out/python/step_00001250 --dataset=my_code/ --block_size=128
#   python train.py config/finetune.py --init_from=auto:gpt2        # resumes if it was interrupted
# The result has not been measured here.
dataset = 'shakespeare'
init_from = 'gpt2'
block_size = 256            # tokens per sequence; the model's context stays as it is

batch_size = 32
micro_batch_size = 4
max_iters = 100
optimizer = 'adamw'
learning_rate = 3e-5
warmup_iters = 10
beta2 = 0.95

eval_interval = 50          # also evaluates before the first step. A GPT-2 checkpoint with its moments takes 1.5 GB
sample_start = '\n'
log_interval = 1
