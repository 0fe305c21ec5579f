/* config_tower.h - vision-language models by their config.json: which ones have a text model that
 * is a family's, and where its config is. */
#ifndef PS_MODEL_CONFIG_TOWER_H
#define PS_MODEL_CONFIG_TOWER_H
#include "model/family.h"

typedef struct ps__tower {
  const char *model_type, *architecture; /* of the whole */
  const char *text_type;                 /* model_type of text_config */
  const char *family;                    /* model_type of the family that its text model is */
  bool is_default;                       /* text_config without model_type is of this type */
  bool flat;      /* older files have the text model's fields beside vision_config. Either
                   * tie_word_embeddings, inner or outer, ties */
  bool has_audio; /* audio_config may be there: an audio tower stays as it is */
  bool tied_by_default;
  const ps__config_default *absent; /* what absent keys of text_config mean; ends with NULL */
} ps__tower;

/* ps__tower_find() - the vision-language model that @r->j is the config of, and its text config;
 * NULL: it is none. Errors: PS_EFORMAT names what is not supported of it. */
ps_status ps__tower_find(const ps__config_reader *r, const ps__tower **out, const ps__json **text);
/* ps__tower_text_alone() - the text model's config as a file of its own, with the type and the
 * class of its family and without M-RoPE, into JSON that the caller frees. PS_ENOMEM. */
ps_status ps__tower_text_alone(ps__json **out, const ps__tower *tower, const ps__json *config,
                               const ps__json *text, const ps_model_config *c);
#endif
