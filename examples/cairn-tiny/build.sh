#!/usr/bin/env bash
# cairn-tiny from nothing: texts, teachers, tokenizer, pretraining, fine-tuning, measurement. One GPU, six to eight minutes.
#
#   CORPORA=...  enwik8.gz, mdn_en_us_md.tar.xz, python_peps_rst.tar.xz      STORIES=...  the folder of stories15M
#   GSM8K=...    gsm8k_train.jsonl                                          ANSWERS=...  SmolLM2's GGUF, or its name
#   bash build.sh WORK_FOLDER
#
# A part whose result is there is not done again. What is shipped is written by pack.py afterwards.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here:${PYTHONPATH:-}" TOKENIZERS_PARALLELISM=true
mkdir -p "$1" && cd "$1"
python=${PYTHON:-python}
: "${SAMPLE_SECONDS:=60}" "${PRETRAIN_SECONDS:=175}" "${SFT_SECONDS:=45}" "${STORY_COUNT:=24000}" "${ANSWER_COUNT:=6000}"
: "${TOGETHER:=1024}" "${SHARE:=1.0}" "${VOCAB:=4096}" "${TRIAL_STEPS:=40}" "${MORE:=}" "${MORE_SFT:=}"
say() { echo "[$SECONDS s] $*"; }

if [ ! -f texts/wiki.jsonl ]; then
  $python "$here/clean_text.py" --corpora "$CORPORA" --out texts
fi
if [ ! -f answers.jsonl ]; then  # four at once: the engine's host work, not the GPU, is what such small models wait for
  for half in 0 1; do
    timeout $((SAMPLE_SECONDS + 90)) $python "$here/sample.py" stories --model "$STORIES" --first $((half * STORY_COUNT)) --count "$STORY_COUNT" \
      --together "$TOGETHER" --seconds "$SAMPLE_SECONDS" --out "stories.$half" &
    timeout $((SAMPLE_SECONDS + 90)) $python "$here/sample.py" answers --model "$ANSWERS" --first $((half * ANSWER_COUNT)) --count "$ANSWER_COUNT" \
      --together "$TOGETHER" --seconds "$SAMPLE_SECONDS" --out "answers.$half" &
  done
  wait
  cat stories.0 stories.1 > stories.jsonl
  cat answers.0 answers.1 > answers.jsonl
  say "sampled $(wc -l < stories.jsonl) stories, $(wc -l < answers.jsonl) answers"
fi
if [ ! -d tokens/chats ]; then
  $python "$here/assemble.py" --texts texts --stories stories.jsonl --answers answers.jsonl --gsm8k "$GSM8K" \
    --out corpus --share "$SHARE"
  $python -m cairn data tokenizer corpus/vocabulary.jsonl --vocab "$VOCAB" --out tokenizer
  say "tokenizer"
  for name in wiki mdn peps; do
    $python -m cairn data tokenize "texts/$name.jsonl" --tokenizer tokenizer --out "tokens/$name" &
  done
  for name in sampled grammar sums; do
    $python -m cairn data tokenize "corpus/text/$name.jsonl" --tokenizer tokenizer --out "tokens/$name" &
  done
  wait
  $python -m cairn data tokenize corpus/chats.jsonl --chat --tokenizer tokenizer --out tokens/chats --longest 1024
  say "tokens"
fi
if [ ! -d runs/pretrain/model ]; then
  for forms in "" "--optim.kind adamw" "--optim.kind adamw --precision.kernels plain"; do
    rm -rf runs/trial
    if $python -m cairn train "$here/pretrain.toml" $MORE $forms --steps "$TRIAL_STEPS" --log.every 1 --out runs/trial --json > trial.json; then
      break
    fi
  done
  say "trial ($forms)"
  steps=$($python "$here/pace.py" trial.json "$here/pretrain.toml" "$PRETRAIN_SECONDS")
  # SIGTERM ends a run after its step, with a checkpoint and an export: rc 130 then.
  timeout -s TERM $((PRETRAIN_SECONDS + 60)) $python -m cairn train "$here/pretrain.toml" $MORE $forms --steps "$steps" \
    --out runs/pretrain --json > pretrain.json || [ -d runs/pretrain/model ]
  say "pretrained for $steps steps"
fi
if [ ! -d runs/sft/model ]; then
  rm -rf runs/trial
  $python -m cairn train "$here/sft.toml" $MORE_SFT --steps "$TRIAL_STEPS" --log.every 1 --out runs/trial --json > trial_sft.json
  steps=$($python "$here/pace.py" trial_sft.json "$here/sft.toml" "$SFT_SECONDS")
  timeout -s TERM $((SFT_SECONDS + 40)) $python -m cairn train "$here/sft.toml" $MORE_SFT --steps "$steps" --out runs/sft --json \
    > sft.json || [ -d runs/sft/model ]
  say "fine-tuned for $steps steps"
fi
$python "$here/evaluate.py" runs/sft/model --out evaluation.json
$python "$here/seen.py" corpus --out seen.json
say "done"
