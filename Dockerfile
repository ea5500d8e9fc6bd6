# The quickstart on a CPU:
#
#   docker build -t lm-eval-editing .
#   docker run --rm -v "$PWD/results:/opt/lm-eval-editing/results" lm-eval-editing
#
# Arguments go to lm_eval: docker run --rm lm-eval-editing --model_args editor=memit --limit 20. Another command:
# docker run --rm --entrypoint lm-edit lm-eval-editing editors.
FROM python:3.12-slim

ENV LM_EDIT_VENV=/opt/venv \
    LM_EDIT_CACHE=/opt/cache \
    LM_EDIT_TORCH=cpu \
    PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/lm-eval-editing
COPY . .
RUN bash -c 'source scripts/_setup.sh && set_up demo'
ENTRYPOINT ["bash", "scripts/quickstart.sh"]
