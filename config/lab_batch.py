# How large should a batch be? The same tokens in batches of 1 to 512 sequences, three seeds. The rate grows with the square root
# of the batch, and half and twice that are tried too. config/lab_batch_time.py asks the same for the same time.
#   python bench.py config/lab.py config/lab_batch.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_batch'
_sequences = max_iters * batch_size
arms = '\n'.join(f'batch {b}, rate {learning_rate * f * (b / batch_size) ** 0.5:.1e}: --batch_size={b} --max_iters={_sequences // b} '
                 f'--warmup_iters={_sequences // b // 10} --log_interval={max(_sequences // b // 30, 1)} '
                 f'--learning_rate={learning_rate * f * (b / batch_size) ** 0.5:.1e}'
                 for b in (1, 8, 32, 128, 512) for f in (1, 0.5, 2))
